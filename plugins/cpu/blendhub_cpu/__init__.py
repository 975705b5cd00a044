"""The CPU device of BlendHub. The entry point names this module, so it imports nothing heavy."""

from importlib.util import find_spec
from typing import Annotated

import msgspec
from msgspec import Meta

from blendhub.contracts import Device
from blendhub.framework.hookspecs import PluginSpec, Unavailable, hookimpl


class CpuOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    block_tokens: Annotated[
        int, Meta(ge=1, le=4096, description="neighbours that are computed in about the time of one")
    ] = 1


def _probe() -> Unavailable | None:
    return None if find_spec("torch") else Unavailable("torch is not installed", "pip install 'torch>=2.4'")


@hookimpl
def blendhub_devices() -> list[PluginSpec[Device]]:
    return [
        PluginSpec(
            name="cpu",
            api=1,
            summary="copies and rotates KV in host memory, with the engine's threads",
            factory="blendhub_cpu.device:CpuDevice",
            options=CpuOptions,
            probe=_probe,
        ),
    ]
