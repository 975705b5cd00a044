"""An NPU as the runtime of the device, through torch_npu."""

import ctypes
import logging
import mmap
import time
import warnings
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from blendhub.devices import Runtime
from blendhub_ascend.operators import COPY_MANY, problem_with

log = logging.getLogger("blendhub.ascend")

Arena: TypeAlias = npt.NDArray[np.uint8]
Pairs: TypeAlias = Sequence[tuple[torch.Tensor, torch.Tensor]]

HOST_TO_NPU, NPU_TO_HOST = 0, 1
"""Directions of ``swap_blocks_batch``."""
MAP_HOST_MEMORY = 0
"""The only type of ``aclrtHostRegister``."""
BATCH_ALIGNMENT = 64
"""Releases of CANN want addresses of copies in batches to be multiples of this."""
TIMED_BYTES = 64 * 2**20
MIN_TIMED_BYTES = 4 * 2**20
"""The time that a smaller copy takes says nothing."""


class AscendRuntime(Runtime):
    """``place`` is where the pages lie; ``batch_copies`` allows vllm-ascend's operator for many copies at once."""

    pinning_advice = "docs/ascend.md says what was tried and what helps"

    def __init__(self, place: torch.device, torch_npu: Any, batch_copies: bool) -> None:
        super().__init__(place, torch_npu.npu)
        self._is_timed = False
        """Whether a copy from registered memory was found to run beside the host."""
        problem = problem_with(COPY_MANY) if batch_copies else "fast_ops is false"
        self._batch_copies = problem is None
        log.info("device 'npu': many copies are submitted %s", f"one by one: {problem}" if problem else "at once")

    def register(self, memory: Arena) -> str | None:
        """Register with ACL, so that the NPU's copy engine reads and writes the memory without a detour."""
        address, nbytes = _whole_pages(memory)
        error = _call("aclrtHostRegister", address, nbytes, MAP_HOST_MEMORY, ctypes.byref(ctypes.c_void_p()))
        # Once is enough, and an engine that is at work distorts later measurements.
        if error is None and not self._is_timed and memory.size >= MIN_TIMED_BYTES:
            self._is_timed = self._copies_run_beside_the_host(memory)
            if not self._is_timed:
                self.unregister(memory)
                return "copies of the registered arena hold up the thread that submits them"
        return error

    def unregister(self, memory: Arena) -> None:
        error = _call("aclrtHostUnregister", _whole_pages(memory)[0])
        if error:
            log.warning("the arena stays registered with the NPU's driver: %s", error)

    def copy(self, stream: Any, pairs: Pairs) -> None:
        if self._batch_copies and len(pairs) > 1 and _are_aligned(pairs):
            self.launch(stream, _copy_at_once, pairs)
        else:
            super().copy(stream, pairs)
        # Whether kernels of a stream wait for its earlier copies has been doubted; an event makes them wait.
        stream.wait_event(self.record_event(stream))

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
            self.copy(stream, [(target, source)])
            submitted = time.perf_counter()
            self.synchronize(self.record_event(stream))
            ended = time.perf_counter()
        return submitted - start < (ended - start) / 2


def load_acl() -> Any:
    """CANN's library. torch_npu itself registers host memory from 2.10.0.post5 on only."""
    return ctypes.CDLL("libascendcl.so")


def _call(name: str, *arguments: Any) -> str | None:
    """Returns the reason of a failure."""
    try:
        status = getattr(load_acl(), name)(*arguments)
    except (OSError, AttributeError) as error:
        return f"{name} failed: {error}"
    return f"{name} returned error {int(status)}" if status else None


def _whole_pages(memory: Arena) -> tuple[ctypes.c_void_p, ctypes.c_uint64]:
    """The address and size of the memory's pages: ACL takes whole ones only. Those around the arena are mapped too."""
    address = memory.ctypes.data
    first = address // mmap.PAGESIZE * mmap.PAGESIZE
    end = -(-(address + memory.size) // mmap.PAGESIZE) * mmap.PAGESIZE
    return ctypes.c_void_p(first), ctypes.c_uint64(end - first)


def _are_aligned(pairs: Pairs) -> bool:
    return all(tensor.data_ptr() % BATCH_ALIGNMENT == 0 for pair in pairs for tensor in pair)


def _copy_at_once(pairs: Pairs) -> None:
    targets, sources = ([tensor.data_ptr() for tensor in side] for side in zip(*pairs, strict=True))
    sizes = [target.nbytes for target, _ in pairs]
    direction = HOST_TO_NPU if pairs[0][1].device.type == "cpu" else NPU_TO_HOST
    as_numbers = (torch.tensor(numbers, dtype=torch.int64) for numbers in (sources, targets, sizes))
    torch.ops._C_ascend.swap_blocks_batch(*as_numbers, direction)
