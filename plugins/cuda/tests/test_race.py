"""On a GPU: the engine reads pages that a load must not change, while the load runs."""

import pytest
import torch
from blendhub_cuda import CudaOptions
from blendhub_cuda.device import CudaDevice

from blendhub.testing.devices.racing import RaceSuite

if not torch.cuda.is_available():
    pytest.skip("torch finds no GPU here; `make gpu-check` on a machine with one", allow_module_level=True)
pytestmark = pytest.mark.cuda


class TestRaces(RaceSuite):
    torch_type, format, block = "cuda", "packed_heads", 16

    def create(self):
        return CudaDevice(CudaOptions())

    def occupy(self):
        torch.cuda._sleep(200_000_000)
