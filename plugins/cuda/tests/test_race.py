"""On a GPU: the engine reads pages that a load must not change, while the load runs."""

import blendhub_cuda
import pytest
import torch

from blendhub.testing.devices.racing import RaceSuite
from harness.device_host import host_of_device

if not torch.cuda.is_available():
    pytest.skip("torch finds no GPU here; `make gpu-check` on a machine with one", allow_module_level=True)
pytestmark = pytest.mark.cuda
HOST = host_of_device(blendhub_cuda)


class TestRaces(RaceSuite):
    torch_type, format, block = "cuda", "packed_heads", 16

    def create(self):
        return HOST.create("device", "cuda")

    def occupy(self):
        torch.cuda._sleep(200_000_000)
