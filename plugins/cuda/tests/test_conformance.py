"""The conformance suite of devices, run on the CUDA device: on a GPU if there is one, else in Triton's interpreter."""

import pytest
import torch
from blendhub_cuda import CudaOptions
from blendhub_cuda.device import CudaDevice
from blendhub_cuda.runtime import CudaRuntime

from blendhub.contracts import Device
from blendhub.testing.devices import DeviceSuite
from blendhub.testing.devices.deferred import DeferredRuntime

HAS_GPU = torch.cuda.is_available()
pytestmark = [] if HAS_GPU else [pytest.mark.slow]


class TestCuda(DeviceSuite):
    torch_type = CudaDevice.torch_type if HAS_GPU else "cpu"
    formats = CudaDevice.formats
    n_random_transfers = 200 if HAS_GPU else 40

    def create(self) -> Device:
        return CudaDevice(CudaOptions(), CudaRuntime if HAS_GPU else lambda device: DeferredRuntime())
