"""A device plugin whose copies end late, on one rank later than on the other, and there not always well.

It may also let that rank run out of memory in the forwards that follow a load.
"""

from typing import Annotated, Any

import msgspec
import torch
from blendhub_cpu import CpuOptions
from blendhub_cpu.device import CpuDevice
from msgspec import Meta
from vllm.distributed.parallel_state import get_tp_group

from blendhub.contracts import Device, Transfer
from blendhub.framework.hookspecs import PluginSpec, hookimpl
from blendhub.vllm.model.engine_model import EngineModel


class LateOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    fails: Annotated[bool, Meta(description="whether copies of the last rank fail")] = False
    crowds: Annotated[bool, Meta(description="whether the last rank runs out of memory after a load")] = False


class LateTransfer(Transfer):
    def __init__(self, copy: Transfer, asks: int, fails: bool) -> None:
        self._copy = copy
        self._asks = asks
        self._fails = fails

    def done(self) -> bool:
        self._asks -= 1
        return self._asks <= 0

    def wait(self) -> None:
        if self._asks > 0:
            print("the engine waited for a copy", flush=True)
        self._copy.wait()
        if self._fails:
            # As CUDA does, for any earlier error.
            raise RuntimeError("CUDA error: a copy failed on this rank")


class LateDevice(CpuDevice):
    overlaps_compute = True

    def __init__(self, options: LateOptions) -> None:
        super().__init__(CpuOptions())
        group = get_tp_group()
        self._asks = 3 + 6 * group.rank_in_group
        is_last = group.rank_in_group == group.world_size - 1
        self._fails, self._crowds = options.fails and is_last, options.crowds and is_last

    def load(self, *given: Any) -> Transfer:
        if self._crowds:
            EngineModel.forward = _out_of_memory
        return LateTransfer(super().load(*given), self._asks, self._fails)


def _out_of_memory(*given: Any, **named: Any) -> Any:
    raise torch.OutOfMemoryError("tried to allocate 2 GiB")


def _late(options: Any) -> Device:
    return LateDevice(options)


@hookimpl
def blendhub_devices() -> list[PluginSpec[Device]]:
    return [PluginSpec(name="late", api=5, summary="late", factory=_late, options=LateOptions)]
