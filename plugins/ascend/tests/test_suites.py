"""The suites of devices: on an NPU, or on stand-ins with torch alone and with the operators of each NPU."""

import blendhub_ascend
import pytest
from blendhub_ascend.device import AscendDevice

from blendhub.testing.devices import DeviceSuite
from blendhub.testing.devices.copying import CopyingTests
from blendhub.testing.devices.lifecycle import LifecycleTests
from blendhub.testing.devices.racing import RaceSuite
from blendhub.testing.devices.streams import StreamSuite
from plugins.ascend.tests.npu_stand_ins import A2, A5, HAS_NPU, NEEDS_STAND_INS, Wide, host_on, installed, npu_runtime
from tests.device_host import host_of_device

NEEDS_NPU = pytest.mark.skipif(not HAS_NPU, reason="torch finds no NPU here; `make npu-check` on a machine with one")
HOST = host_of_device(blendhub_ascend)


class CopyingAndLifecycle(CopyingTests, LifecycleTests):
    pass


@pytest.mark.slow
class TestTorchAlone(installed(DeviceSuite, host_on(), fast_ops=False)):  # type: ignore[misc]
    """What runs with any release of torch_npu, on a runtime that defers all work."""

    n_random_transfers = 100


@pytest.mark.slow
@NEEDS_STAND_INS
class TestA2(Wide, installed(CopyingAndLifecycle, host_on(npu_runtime(A2), A2))):  # type: ignore[misc]
    """What does not depend on the widths of pages."""


@pytest.mark.slow
@NEEDS_STAND_INS
class TestA5(Wide, installed(CopyingTests, host_on(npu_runtime(A5), A5))):  # type: ignore[misc]
    """What depends on the operators that write and read pages."""


@pytest.mark.slow
@NEEDS_STAND_INS
class TestStreams(StreamSuite):
    """With the operators of one NPU: which ones they are changes nothing of the order."""

    formats = AscendDevice.formats
    fields = Wide.fields

    def create(self, runtime):
        # One layer of a chunk in each stream, so that a chunk passes through each stream several times.
        return host_on(lambda place, chosen: runtime).create("device", "npu", {"staging_mib": 0.058})


@pytest.mark.npu
@NEEDS_NPU
class TestNpu(Wide, DeviceSuite):
    torch_type, formats, dtypes = "npu", AscendDevice.formats, AscendDevice.dtypes

    def create(self):
        return HOST.create("device", "npu")


@pytest.mark.npu
@NEEDS_NPU
class TestRaces(RaceSuite):
    torch_type, format, block = "npu", "split", 128
    fast_ops = True

    def create(self):
        return HOST.create("device", "npu", {"fast_ops": self.fast_ops})


class TestRacesOfTorchAlone(TestRaces):
    fast_ops = False
