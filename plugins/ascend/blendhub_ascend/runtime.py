"""An NPU as the runtime of the device, through torch_npu."""

import logging
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from blendhub.devices import Runtime
from blendhub_ascend.host_memory import HostMemory
from blendhub_ascend.schemas import problem_with

log = logging.getLogger("blendhub.ascend")

Arena: TypeAlias = npt.NDArray[np.uint8]
Pairs: TypeAlias = Sequence[tuple[torch.Tensor, torch.Tensor]]

HOST_TO_NPU, NPU_TO_HOST = 0, 1
"""Directions of ``swap_blocks_batch``."""
BATCH_ALIGNMENT = 64
"""Releases of CANN want addresses of copies in batches to be multiples of this."""
TIMED_BYTES = 64 * 2**20
LEAST_TIMED_BYTES = 4 * 2**20
"""The time that a smaller copy takes says nothing."""


class AscendRuntime(Runtime):
    """``place`` is where the pages lie; ``batch_copies`` allows vllm-ascend's operator for many copies at once."""

    pinning_advice = "docs/ascend.md says what was tried and what helps"

    def __init__(self, place: torch.device, torch_npu: Any, batch_copies: bool) -> None:
        super().__init__()
        self._npu = torch_npu.npu
        self._place = place
        self._is_timed = False
        """Whether a copy from registered memory was found to run beside the host."""
        self._host_memory = HostMemory(self._npu)
        problem = problem_with("_C_ascend::swap_blocks_batch") if batch_copies else "fast_ops is false"
        self._batch_copies = problem is None
        log.info("device 'npu': many copies are submitted %s", f"one by one: {problem}" if problem else "at once")

    def set_device(self) -> None:
        # ACL's context belongs to a thread; without it, all calls of a thread fail with error 107002.
        self._npu.set_device(self._place)

    def create_stream(self) -> Any:
        return self._npu.Stream(self._place)

    def record_event(self, stream: Any = None) -> Any:
        event = self._npu.Event()
        event.record(stream or self._npu.current_stream(self._place))
        return event

    def wait_event(self, stream: Any, event: Any) -> None:
        stream.wait_event(event)

    def query(self, event: Any) -> bool:
        return bool(event.query())

    def synchronize(self, event: Any) -> None:
        event.synchronize()

    def allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._place)

    def allocate_pinned(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def register(self, memory: Arena) -> str | None:
        error = self._host_memory.register(memory.ctypes.data, memory.size)
        # Once is enough, and an engine that is at work distorts later measurements.
        if error is None and not self._is_timed and memory.size >= LEAST_TIMED_BYTES:
            self._is_timed = self._copies_run_beside_the_host(memory)
            if not self._is_timed:
                self.unregister(memory)
                return "copies of the registered arena hold up the thread that submits them"
        return error

    def unregister(self, memory: Arena) -> None:
        error = self._host_memory.unregister(memory.ctypes.data)
        if error:
            log.warning("the arena stays registered with the NPU's driver: %s", error)

    def copy(self, stream: Any, target: torch.Tensor, source: torch.Tensor) -> None:
        self.copy_many(stream, [(target, source)])

    def copy_many(self, stream: Any, pairs: Pairs) -> None:
        with self._npu.stream(stream):
            if self._batch_copies and len(pairs) > 1 and _are_aligned(pairs):
                _copy_at_once(pairs)
            else:
                for target, source in pairs:
                    target.copy_(source, non_blocking=True)
        # That kernels of a stream wait for the stream's earlier copies has been doubted; an event makes it sure.
        stream.wait_event(self.record_event(stream))

    def launch(self, stream: Any, kernel: Callable[..., object], arguments: Mapping[str, Any]) -> None:
        with self._npu.stream(stream):
            kernel(**arguments)

    def _copies_run_beside_the_host(self, arena: Arena) -> bool:
        """Whether a copy from the arena returns long before it ends. Host memory that ACL does not know blocks."""
        nbytes = min(arena.size, TIMED_BYTES)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch has no read-only tensors, and this one is only read
            source = torch.from_numpy(arena[:nbytes])
        stream, target = self.create_stream(), self.allocate(nbytes)
        self.synchronize(self.record_event())
        for _ in range(2):  # the first round warms up
            start = time.perf_counter()
            self.copy(stream, target, source)
            submitted = time.perf_counter()
            self.synchronize(self.record_event(stream))
            ended = time.perf_counter()
        return submitted - start < (ended - start) / 2


def _are_aligned(pairs: Pairs) -> bool:
    return all(one.data_ptr() % BATCH_ALIGNMENT == 0 for pair in pairs for one in pair)


def _copy_at_once(pairs: Pairs) -> None:
    targets, sources = ([one.data_ptr() for one in side] for side in zip(*pairs, strict=True))
    sizes = [target.nbytes for target, _ in pairs]
    direction = HOST_TO_NPU if pairs[0][1].device.type == "cpu" else NPU_TO_HOST
    as_numbers = (torch.tensor(numbers, dtype=torch.int64) for numbers in (sources, targets, sizes))
    torch.ops._C_ascend.swap_blocks_batch(*as_numbers, direction)
