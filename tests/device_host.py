"""A host for the tests of a device whose hardware this machine may lack."""

from importlib.metadata import EntryPoint
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import msgspec

from blendhub import PluginHost
from blendhub.contracts import Device
from blendhub.framework.hookspecs import PROJECT, PluginSpec, hookimpl


def host_of_device(plugin: ModuleType, **changes: Any) -> PluginHost:
    """A host of a built-in device, whose spec has these fields in place of its own: a factory, and a probe, that need
    no hardware.

    The device need not be installed: a plain checkout is tested on GPUs and NPUs.
    """
    hooks = ModuleType(plugin.__name__)

    @hookimpl
    def blendhub_devices() -> list[PluginSpec[Device]]:
        return [msgspec.structs.replace(spec, **changes) for spec in plugin.blendhub_devices()]

    hooks.blendhub_devices = blendhub_devices  # type: ignore[attr-defined]

    class Entry(EntryPoint):
        dist: ClassVar[Any] = SimpleNamespace(name=plugin.__name__.replace("_", "-"), version="0")

        def load(self) -> ModuleType:
            return hooks

    return PluginHost([Entry(plugin.__name__, plugin.__name__, PROJECT)])
