"""The conformance suite of devices: each test stands for a sentence of :mod:`blendhub.contracts.device`."""

from blendhub.testing.devices.attending import AttentionTests
from blendhub.testing.devices.copying import CopyingTests
from blendhub.testing.devices.formats import FormatTests, RotationTests
from blendhub.testing.devices.lifecycle import LifecycleTests
from blendhub.testing.devices.random import RandomTests
from blendhub.testing.devices.refusing import DeviceRefusingTests


class DeviceSuite(
    CopyingTests, FormatTests, RotationTests, DeviceRefusingTests, LifecycleTests, RandomTests, AttentionTests
):
    """Subclass it as ``class TestMine(DeviceSuite)`` with a ``create`` that makes a device."""
