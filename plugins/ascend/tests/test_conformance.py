"""The suites of devices, on devices that the host makes: with torch alone, and with the operators of each NPU."""

import pytest
from blendhub_ascend.device import AscendDevice

from blendhub.contracts import Device
from blendhub.testing.devices import DeviceSuite
from blendhub.testing.devices.copying import CopyingTests
from blendhub.testing.devices.formats import RotationTests
from blendhub.testing.devices.lifecycle import LifecycleTests
from blendhub.testing.devices.streams import StreamSuite
from plugins.ascend.tests.npu_stand_ins import A2, A5, NEEDS_STAND_INS, WIDE, Wide, device_on, device_on_npu_runtime

pytestmark = pytest.mark.slow

SMALL_STAGING = 0.055
"""MiB of staging: one layer of a chunk in each stream, so that a chunk passes through each stream several times."""


class TestTorchAlone(DeviceSuite):
    """What runs with any release of torch_npu, on a runtime that defers all work."""

    n_random_transfers = 100
    formats = AscendDevice.formats
    dtypes = AscendDevice.dtypes

    def create(self) -> Device:
        return device_on(fast_ops=False)


@NEEDS_STAND_INS
class TestA2(Wide, CopyingTests, RotationTests, LifecycleTests):
    """All that does not depend on other widths."""

    def create(self) -> Device:
        return device_on_npu_runtime(A2)


@NEEDS_STAND_INS
class TestA5(Wide, CopyingTests):
    """What depends on the operators that write and read pages."""

    def create(self) -> Device:
        return device_on_npu_runtime(A5)


@NEEDS_STAND_INS
class TestStreams(StreamSuite):
    """With the operators of one NPU: which ones they are changes nothing of the order."""

    formats = AscendDevice.formats
    fields = WIDE

    def create(self, runtime):
        return device_on(runtime, staging_mib=SMALL_STAGING)
