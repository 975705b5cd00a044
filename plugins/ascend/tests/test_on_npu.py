"""On an NPU: the conformance suite of devices, and pages that an engine reads and a load must not change meanwhile."""

import blendhub_ascend
import pytest

from blendhub.testing.devices import DeviceSuite
from blendhub.testing.devices.racing import RaceSuite
from harness.device_host import host_of_device
from plugins.ascend.tests.npu_stand_ins import HAS_NPU, Wide

if not HAS_NPU:
    pytest.skip("torch finds no NPU here; `make npu-check` on a machine with one", allow_module_level=True)
pytestmark = pytest.mark.npu
HOST = host_of_device(blendhub_ascend)


class TestNpu(Wide, DeviceSuite):
    torch_type = "npu"

    def create(self):
        return HOST.create("device", "npu")


@pytest.mark.parametrize("fast_ops", [True, False], ids=["operators", "torch alone"], scope="class")
class TestRaces(RaceSuite):
    torch_type, format, block = "npu", "split", 128

    @pytest.fixture(autouse=True)
    def choose(self, fast_ops):
        self.fast_ops = fast_ops

    def create(self):
        return HOST.create("device", "npu", {"fast_ops": self.fast_ops})
