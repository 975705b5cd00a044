"""The conformance suite of devices: with torch alone, with the operators of each NPU, and on an NPU if there is one."""

import pytest
from blendhub_ascend.device import AscendDevice
from blendhub_ascend.factory import create
from blendhub_ascend.options import AscendOptions
from npu_stand_ins import A2, A5, NEEDS_STAND_INS, device_on, device_on_npu_runtime

from blendhub.contracts import Device
from blendhub.testing.devices import DeviceSuite
from blendhub.testing.devices.copying import CopyingTests
from blendhub.testing.devices.formats import FormatTests
from blendhub.testing.devices.lifecycle import LifecycleTests
from blendhub.testing.devices.refusing import RefusingTests
from blendhub.testing.devices.rotation import RotationTests


class TestTorchAlone(DeviceSuite):
    """What runs with any release of torch_npu, on a runtime that defers all work."""

    formats = AscendDevice.formats
    dtypes = AscendDevice.dtypes

    def create(self) -> Device:
        return device_on(fast_ops=False)


class Wide:
    """Pages of widths that the operators of torch_npu take, unless a test wants others."""

    formats = AscendDevice.formats
    dtypes = AscendDevice.dtypes

    def setup(self, **fields):
        return super().setup(**{"key_dim": 16, "value_dim": 16, **fields})


@NEEDS_STAND_INS
class TestA2(Wide, CopyingTests, FormatTests, RotationTests, RefusingTests, LifecycleTests):
    """All but random layouts, of which few have such widths."""

    def create(self) -> Device:
        return device_on_npu_runtime(A2)


@NEEDS_STAND_INS
class TestA5(Wide, CopyingTests, LifecycleTests):
    """What depends on the operators that write and read pages."""

    def create(self) -> Device:
        return device_on_npu_runtime(A5)


@pytest.mark.npu
class TestNpu(Wide, DeviceSuite):
    torch_type = "npu"

    def create(self) -> Device:
        return create(AscendOptions())
