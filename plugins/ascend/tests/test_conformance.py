"""The conformance suite of devices: with torch alone, and with the operators of each NPU."""

import inspect
import re

from blendhub_ascend.device import AscendDevice
from npu_stand_ins import A2, A5, NEEDS_STAND_INS, Wide, device_on, device_on_npu_runtime

from blendhub.contracts import Device
from blendhub.testing.devices import DeviceSuite
from blendhub.testing.devices.copying import CopyingTests
from blendhub.testing.devices.formats import FormatTests
from blendhub.testing.devices.lifecycle import LifecycleTests
from blendhub.testing.devices.refusing import RefusingTests
from blendhub.testing.devices.rotation import RotationTests


class TestTorchAlone(DeviceSuite):
    """What runs with any release of torch_npu, on a runtime that defers all work."""

    # Twice as many are tried on an NPU.
    n_random_transfers = 100
    formats = AscendDevice.formats
    dtypes = AscendDevice.dtypes

    def create(self) -> Device:
        return device_on(fast_ops=False)


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


def test_the_suite_leaves_out_what_needs_numbers_of_8_bits_and_nothing_else():
    """A test of the suite is left out only where an argument has no value with this device."""
    for suite in (TestTorchAlone, TestA2):
        assert {name for name, values in suite().parameters().items() if not values} == {"dtype_of_8_bits"}
        parts = [inspect.getsource(part) for part in suite.__mro__ if part.__module__.startswith("blendhub.testing")]
        assert len(parts) > 5 and not any(re.search(r"\bskip(if)?\(", part) for part in parts)
