"""The suites of devices on the CUDA device: on a GPU if there is one, else in Triton's interpreter."""

import blendhub_cuda
import pytest
import torch
from blendhub_cuda.device import CudaDevice

from blendhub.framework.hookspecs import available_everywhere
from blendhub.testing.devices import DeviceSuite
from blendhub.testing.devices.deferred import DeferredRuntime
from blendhub.testing.devices.racing import RaceSuite
from blendhub.testing.devices.streams import StreamSuite
from tests.device_host import host_of_device

HAS_GPU = torch.cuda.is_available()
SMALL_STAGING = 0.06
"""MiB of staging: one layer of a chunk in each stream, so that a chunk passes through each stream several times."""


def on_the_host(options: blendhub_cuda.CudaOptions) -> CudaDevice:
    return CudaDevice(options, lambda place: DeferredRuntime())


CHANGES = {} if HAS_GPU else {"factory": on_the_host, "probe": available_everywhere}
HOST = host_of_device(blendhub_cuda, **CHANGES)


@(pytest.mark.cuda if HAS_GPU else pytest.mark.slow)
class TestCuda(DeviceSuite.of_installed(HOST, "cuda", {})):  # type: ignore[misc]
    """The suite that ``blendhub conformance`` runs."""

    torch_type = CudaDevice.torch_type if HAS_GPU else "cpu"
    n_random_transfers = 200 if HAS_GPU else 40


@pytest.mark.slow
@pytest.mark.skipif(HAS_GPU, reason="kernels are compiled for the GPU here")
class TestStreams(StreamSuite):
    formats = CudaDevice.formats

    def create(self, runtime):
        return CudaDevice(blendhub_cuda.CudaOptions(staging_mib=SMALL_STAGING), lambda place: runtime)


@pytest.mark.cuda
@pytest.mark.skipif(not HAS_GPU, reason="torch finds no GPU here; `make gpu-check` on a machine with one")
class TestRaces(RaceSuite):
    torch_type, format, block = "cuda", "packed_heads", 16

    def create(self):
        return HOST.create("device", "cuda")
