"""A device plugin whose copies end late, on one rank later than on the other, and there not always well."""

from typing import Annotated, Any

import msgspec
from blendhub_cpu.device import CpuDevice
from blendhub_cpu.options import CpuOptions
from msgspec import Meta
from vllm.distributed.parallel_state import get_tp_group

from blendhub.contracts import Device, Transfer
from blendhub.errors import HubError
from blendhub.hookspecs import PluginSpec, hookimpl


class LateOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    fails: Annotated[bool, Meta(description="whether copies of the last rank fail")] = False


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
            raise HubError("a copy failed on this rank")


class LateDevice(CpuDevice):
    overlaps_compute = True

    def __init__(self, options: LateOptions) -> None:
        super().__init__(CpuOptions())
        group = get_tp_group()
        self._asks = 3 + 6 * group.rank_in_group
        self._fails = options.fails and group.rank_in_group == group.world_size - 1

    def load(self, *given: Any) -> Transfer:
        return LateTransfer(super().load(*given), self._asks, self._fails)


def _late(options: Any) -> Device:
    return LateDevice(options)


@hookimpl
def blendhub_devices() -> list[PluginSpec[Device]]:
    return [PluginSpec(name="late", api=2, summary="late", factory=_late, options=LateOptions)]
