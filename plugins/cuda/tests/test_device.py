"""Options and errors of the CUDA device that the contract does not cover."""

import ctypes
from typing import Any

import blendhub_cuda
import pytest
import torch
from blendhub_cuda import CudaOptions
from blendhub_cuda.device import CudaDevice
from blendhub_cuda.runtime import CudaRuntime, kernels_use_host_addresses
from msgspec.structs import replace

from blendhub.core.errors import Unsupported
from blendhub.testing.devices.deferred import DeferredRuntime
from blendhub.testing.devices.device_harness import DeviceHarness, DeviceSetup, Rotary

HAS_GPU = torch.cuda.is_available()


class Driver:
    """``libcuda``, and ``libamdhip64``, which have the attribute under other numbers."""

    def __init__(self, value, status):
        self.value, self.status, self.asked = value, status, []

    def cuDeviceGetAttribute(self, answer, attribute, device):
        self.asked.append((attribute, device))
        answer._obj.value = self.value
        return self.status

    hipDeviceGetAttribute = cuDeviceGetAttribute


@pytest.mark.parametrize("hip, attribute", [(None, 91), ("6.4", 4)])
def test_kernels_use_host_addresses_only_where_the_driver_says_that_they_may(monkeypatch, hip, attribute):
    monkeypatch.setattr(torch.version, "hip", hip)
    for value, status, expected in ((1, 0, True), (0, 0, False), (1, 101, False)):
        driver = Driver(value, status)
        load: Any = lambda name, driver=driver: driver  # noqa: E731
        assert kernels_use_host_addresses(torch.device("cuda", 2), load) is expected
        assert driver.asked == [(attribute, 2)]
    for no_driver in (lambda name: object(), lambda name: ctypes.CDLL("lib-not-there.so")):
        assert not kernels_use_host_addresses(torch.device("cuda", 2), no_driver)


def test_pages_that_are_not_on_a_gpu_are_refused():
    with pytest.raises(Unsupported, match="supports only pages in GPU memory"):
        DeviceHarness(CudaDevice(CudaOptions()), "cpu", DeviceSetup())


@pytest.mark.parametrize(
    "cuda, hip, reason, command",
    [
        (None, None, "for CPUs only", "pip install --force-reinstall 'torch>=2.6'"),
        ("12.8", None, "finds no GPU", "make one visible; nvidia-smi shows those there are"),
        (None, "6.4", "finds no GPU", "make one visible; rocm-smi shows those there are"),
        ("12.8", "no Triton", "Triton is not installed", "pip install 'triton>=3.2'"),
    ],
)
def test_the_probe_explains_why_the_device_is_unavailable(monkeypatch, cuda, hip, reason, command):
    has_no_triton = hip == "no Triton"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_no_triton)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", None if has_no_triton else hip)
    monkeypatch.setattr(blendhub_cuda, "find_spec", lambda name: None if has_no_triton and name == "triton" else name)
    (spec,) = blendhub_cuda.blendhub_devices()
    unavailable = spec.probe()
    assert reason in unavailable.reason and unavailable.command == command


@pytest.mark.parametrize("dtype, offset", [("bfloat16", 0), ("float8_e4m3", 64)])
def test_aligned_pages_of_a_real_model_s_widths(dtype, offset):
    """These widths allow accesses of 16 bytes; the widths of the other tests do not."""
    rotations = Rotary(width=64, offset=offset), Rotary(width=128), Rotary(width=64, offset=offset, neox=False)
    wide = DeviceSetup(kv_heads=2, key_dim=128, value_dim=128, block_size=16, chunk_tokens=32, n_blocks=8)
    runtime, place = (CudaRuntime, "cuda") if HAS_GPU else (lambda place: DeferredRuntime(), "cpu")
    device = CudaDevice(CudaOptions(), runtime)
    harness = DeviceHarness(device, place, replace(wide, dtype=dtype, rotations=rotations))
    segments = [
        replace(one, shard=number * harness.layout.shard_bytes) for number, one in enumerate(harness.chunks(3, 80))
    ]
    harness.load([replace(one, source_start=one.span.start + 200) for one in segments], skip_prefix_n_tokens=7)
    harness.overwrite_pages()
    harness.save(segments)
    harness.device.close()
