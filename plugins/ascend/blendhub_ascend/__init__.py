"""The Ascend NPU device of BlendHub. The entry point names this module, so it imports nothing heavy."""

from typing import Annotated

import msgspec
from msgspec import Meta

from blendhub.contracts import Device
from blendhub.framework.hookspecs import PluginSpec, hookimpl
from blendhub_ascend.availability import details, probe


class AscendOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    staging_mib: Annotated[
        float,
        Meta(
            gt=0,
            le=65536,
            description="NPU memory that stages KV in transit; a sixth must hold one layer of a chunk",
        ),
    ] = 96.0
    block_tokens: Annotated[
        int, Meta(ge=1, le=4096, description="neighbours that are computed in about the time of one")
    ] = 32
    fast_ops: Annotated[
        bool,
        Meta(description="use torch_npu's own operators where a trial at the start proves them; false: torch alone"),
    ] = True


@hookimpl
def blendhub_devices() -> list[PluginSpec[Device]]:
    return [
        PluginSpec(
            name="npu",
            api=1,
            summary="copies and rotates KV between host and NPU memory, beside the engine's work",
            factory="blendhub_ascend.device:create",
            options=AscendOptions,
            probe=probe,
            details=details,
        ),
    ]
