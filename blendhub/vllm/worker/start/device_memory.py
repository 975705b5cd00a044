"""Device memory that vLLM has not counted: it sizes its KV cache before a connector has any."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from blendhub.vllm.model.engine_model import EngineModel

log = logging.getLogger(__name__)


class DeviceMemory:
    """Counts what BlendHub keeps: private builders, tables of rotations, staging."""

    def __init__(self) -> None:
        self.kept_bytes = 0
        self.probe_bytes = 0
        """What a probe of the longest prompt takes for a while."""

    @contextmanager
    def counted(self, device: torch.device) -> Iterator[None]:
        """Count what is allocated in this context and still is at its end."""
        before = _allocated(device)
        yield
        self.kept_bytes += _allocated(device) - before

    def log_how_much(self, model: EngineModel) -> None:
        """Say how much of the device to leave free, where there is such memory."""
        if model.device.type == "cpu":
            return
        free, total = torch.get_device_module(model.device).mem_get_info(model.device)
        brief = max(model.metadata_bytes, self.probe_bytes)
        line = (
            f"of the device's {_mib(total)} MiB, BlendHub keeps {_mib(self.kept_bytes)} MiB and takes up to "
            f"{_mib(brief)} MiB for a while, which vLLM does not count; {_mib(free)} MiB are free"
        )
        if free < brief:
            share = (self.kept_bytes + brief) / total
            log.warning("%s: a request may run out of memory; lower --gpu-memory-utilization by %.3f", line, share)
        else:
            log.info("%s", line)


def _allocated(device: torch.device) -> int:
    if device.type == "cpu":
        return 0
    allocated: int = torch.get_device_module(device).memory_allocated(device)
    return allocated


def _mib(nbytes: int) -> int:
    return -(-nbytes // 2**20)
