"""What this distribution offers. BlendHub imports this module to list it, so torch waits in ``device.py``."""

from importlib.util import find_spec

from blendhub import PluginSpec, Unavailable, hookimpl
from blendhub.contracts import Device


def _needs_torch() -> Unavailable | None:
    return None if find_spec("torch") else Unavailable("torch is not installed", "pip install torch")


@hookimpl
def blendhub_devices() -> list[PluginSpec[Device]]:
    return [
        PluginSpec(
            name="plain",
            api=1,
            summary="copies and rotates KV with nothing but torch, while the engine waits",
            factory="plain_device.device:PlainDevice",
            probe=_needs_torch,
        ),
    ]
