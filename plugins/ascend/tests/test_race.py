"""On an NPU: the engine reads pages that a load must not change, while the load runs."""

import pytest
from blendhub_ascend.factory import create
from blendhub_ascend.options import AscendOptions

from blendhub.testing.devices.racing import RaceSuite


@pytest.mark.npu
@pytest.mark.parametrize("fast_ops", [True, False], ids=["operators", "torch alone"], scope="class")
class TestRaces(RaceSuite):
    torch_type, format, block = "npu", "split", 128
    fast_ops = True

    @pytest.fixture(autouse=True)
    def choose(self, fast_ops):
        self.fast_ops = fast_ops

    def create(self):
        return create(AscendOptions(fast_ops=self.fast_ops))
