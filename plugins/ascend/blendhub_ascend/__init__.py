"""The Ascend NPU device of BlendHub. The entry point names this module, so it imports nothing heavy."""

from blendhub.contracts import Device
from blendhub.framework.hookspecs import PluginSpec, hookimpl
from blendhub_ascend.availability import details, probe
from blendhub_ascend.options import AscendOptions


@hookimpl
def blendhub_devices() -> list[PluginSpec[Device]]:
    return [
        PluginSpec(
            name="npu",
            api=3,
            summary="copies and rotates KV between host and NPU memory, beside the engine's work",
            factory="blendhub_ascend.factory:create",
            options=AscendOptions,
            probe=probe,
            details=details,
        ),
    ]
