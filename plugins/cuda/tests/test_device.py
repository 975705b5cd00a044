"""Options and errors of the CUDA device that the contract does not cover."""

import ctypes
import threading
from typing import Any

import blendhub_cuda
import msgspec
import numpy as np
import pytest
import torch
from blendhub_cuda import CudaOptions
from blendhub_cuda.device import CudaDevice
from blendhub_cuda.runtime import CudaRuntime, kernels_use_host_addresses

from blendhub.core.errors import InvalidInput, Unsupported
from blendhub.devices import stream_device
from blendhub.testing.devices.deferred import DeferredRuntime
from blendhub.testing.devices.device_harness import DeviceHarness, DeviceSetup, Rotary

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
RUNTIME = CudaRuntime if HAS_GPU else DeferredRuntime

replace = msgspec.structs.replace


def device_of(**options):
    return CudaDevice(CudaOptions(**options), CudaRuntime if HAS_GPU else lambda device: DeferredRuntime())


def harness_of(setup=None, **options):
    return DeviceHarness(device_of(**options), DEVICE, setup or DeviceSetup())


@pytest.fixture
def harness():
    made = harness_of()
    yield made
    made.device.close()


def test_device_memory_is_bounded_by_staging_mib(monkeypatch):
    allocate, allocated = RUNTIME.allocate, []

    def record(runtime, nbytes):
        allocated.append(nbytes)
        return allocate(runtime, nbytes)

    monkeypatch.setattr(RUNTIME, "allocate", record)
    harness = harness_of()
    assert 0 < sum(allocated) <= 192 * 2**20
    harness.device.wait_until_pinned()
    assert harness.device._arena.is_pinned(harness.arena.size)
    harness.device.close()


def test_the_error_about_too_little_staging_names_a_sufficient_value():
    setup = DeviceSetup(chunk_tokens=256)
    with pytest.raises(InvalidInput, match=r"staging_mib = 0\.1 is too little.*set it to") as raised:
        harness_of(setup, staging_mib=0.1)
    enough = float(str(raised.value).split("set it to ")[1].split()[0])
    harness = harness_of(setup, staging_mib=enough)
    harness.load(harness.chunks(0, 80))
    harness.device.close()


def test_an_arena_may_come_before_the_pages_and_lie_anywhere(harness):
    device = device_of()
    harness.arena = np.concatenate([np.zeros(1, np.uint8), harness.arena])[1:]
    device.pin(harness.arena)
    device.attach(harness.layers, harness.setup.block_size, harness.layout)
    harness.device.close()
    harness.device = device
    harness.load(harness.chunks(3, 60))


def test_a_thread_sets_its_gpu_once(monkeypatch):
    """A thread that did not would occupy half a GiB of the first GPU."""
    places = []
    monkeypatch.setattr(torch.cuda, "set_device", places.append)
    runtime, gpu = CudaRuntime(torch.device("cuda", 3)), torch.device("cuda", 3)
    for number in (1, 2):
        thread = threading.Thread(target=lambda: [runtime.enter() for _ in range(2)])
        thread.start()
        thread.join()
        assert places == [gpu] * number


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


def test_more_slots_than_32_bits_number_are_refused(monkeypatch):
    monkeypatch.setattr(stream_device, "MAX_SLOTS", 13 * 8)
    with pytest.raises(Unsupported, match="13 blocks of 8 tokens are too many"):
        harness_of()


@pytest.mark.parametrize("dtype, offset", [("bfloat16", 0), ("float8_e4m3", 64)])
def test_aligned_pages_of_a_real_model_s_widths(dtype, offset):
    """These widths allow accesses of 16 bytes; the widths of the other tests do not."""
    rotations = (
        Rotary(width=64, offset=offset),
        Rotary(width=128),
        Rotary(width=64, offset=offset, neox=False),
    )
    wide = DeviceSetup(kv_heads=2, key_dim=128, value_dim=128, block_size=16, chunk_tokens=32, n_blocks=8)
    harness = harness_of(replace(wide, dtype=dtype, rotations=rotations))
    segments = [
        replace(one, shard=number * harness.layout.shard_bytes) for number, one in enumerate(harness.chunks(3, 80))
    ]
    harness.load([replace(one, source_start=one.span.start + 200) for one in segments], skip_prefix_n_tokens=7)
    harness.overwrite_pages()
    harness.save(segments)
    harness.device.close()


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
