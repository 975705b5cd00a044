"""The conformance suite of devices: each test stands for a sentence of :mod:`blendhub.contracts.device`.

It needs torch.
"""

from collections.abc import Mapping
from contextlib import closing
from typing import Any

from blendhub.contracts import Device
from blendhub.framework.host import PluginHost
from blendhub.testing.devices.attending import AttentionTests
from blendhub.testing.devices.copying import CopyingTests
from blendhub.testing.devices.formats import FormatTests
from blendhub.testing.devices.lifecycle import LifecycleTests
from blendhub.testing.devices.random import RandomTests
from blendhub.testing.devices.refusing import DeviceRefusingTests


class DeviceSuite(CopyingTests, FormatTests, DeviceRefusingTests, LifecycleTests, RandomTests):
    """Subclass it as ``class TestMine(DeviceSuite)`` with a ``create`` that makes a device; a device with attention of
    its own is tested by ``class TestMine(DeviceSuite, AttentionTests)``."""

    @classmethod
    def of_installed(cls, host: PluginHost, name: str, options: Mapping[str, Any]) -> type["DeviceSuite"]:
        """The suite of an installed device; raises if it cannot be created with these options."""

        def create(suite: object) -> Any:
            return host.create("device", name, options)

        with closing(create(None)) as device:
            fields = {field: getattr(device, field) for field in ("torch_type", "formats", "dtypes")}
            bases = (cls,) if type(device).attention is Device.attention else (cls, AttentionTests)
        return type("TestInstalledDevice", bases, {"create": create, **fields})
