"""The conformance suite of devices: each test stands for a sentence of :mod:`blendhub.contracts.device`.

It needs torch.
"""

from blendhub.contracts import Device
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
    def parts_for(cls, device: Device) -> tuple[type, ...]:
        return (cls,) if type(device).attention is Device.attention else (cls, AttentionTests)
