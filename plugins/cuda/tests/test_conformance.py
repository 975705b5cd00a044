"""The conformance suite of devices, run on the CUDA device as on a stranger's: through the host.

It runs on a GPU if there is one, else in Triton's interpreter.
"""

import blendhub_cuda
import pytest
import torch
from blendhub_cuda.device import CudaDevice

from blendhub.framework.hookspecs import available_everywhere
from blendhub.testing.devices import DeviceSuite
from blendhub.testing.devices.deferred import DeferredRuntime
from harness.device_host import host_of_device

HAS_GPU = torch.cuda.is_available()
pytestmark = [] if HAS_GPU else [pytest.mark.slow]


def on_the_host(options: blendhub_cuda.CudaOptions) -> CudaDevice:
    return CudaDevice(options, lambda place: DeferredRuntime())


CHANGES = {} if HAS_GPU else {"factory": on_the_host, "probe": available_everywhere}
HOST = host_of_device(blendhub_cuda, **CHANGES)


class TestCuda(DeviceSuite.of_installed(HOST, "cuda", {})):  # type: ignore[misc]
    torch_type = CudaDevice.torch_type if HAS_GPU else "cpu"
    n_random_transfers = 200 if HAS_GPU else 40
