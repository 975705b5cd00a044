"""Options and errors of the CUDA device that the contract does not cover."""

import threading

import blendhub_cuda
import msgspec
import numpy as np
import pytest
import torch
from blendhub_cuda import CudaOptions
from blendhub_cuda.device import CudaDevice
from blendhub_cuda.runtime import CudaRuntime

from blendhub.core.errors import InvalidInput, Unsupported
from blendhub.testing.devices.deferred import DeferredRuntime
from blendhub.testing.devices.device_harness import DeviceHarness, Rotary, Setup

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
RUNTIME = CudaRuntime if HAS_GPU else DeferredRuntime

replace = msgspec.structs.replace


def device_of(**options):
    return CudaDevice(CudaOptions(**options), CudaRuntime if HAS_GPU else lambda device: DeferredRuntime())


def harness_of(setup=None, **options):
    return DeviceHarness(device_of(**options), DEVICE, setup or Setup())


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
    assert 0 < sum(allocated) <= 64 * 2**20
    harness.device.wait_until_pinned()
    assert harness.device._arena.is_pinned(0, harness.arena.size)
    harness.device.close()


def test_the_error_about_too_little_staging_names_a_sufficient_value():
    setup = Setup(chunk_tokens=256)
    with pytest.raises(InvalidInput, match=r"staging_mib = 0\.1 is too little.*set it to") as raised:
        harness_of(setup, staging_mib=0.1)
    enough = float(str(raised.value).split("set it to ")[1].split()[0])
    harness = harness_of(setup, staging_mib=enough)
    harness.load(harness.chunks(0, 80))
    harness.device.close()


def test_an_arena_may_come_before_the_pages(harness):
    device = device_of()
    device.pin(harness.arena)
    device.attach(harness.layers, harness.setup.block_size, harness.layout)
    harness.device.close()
    harness.device = device
    harness.load(harness.chunks(3, 60))


def test_an_arena_begins_at_an_address_that_kernels_read_well(harness):
    with pytest.raises(InvalidInput, match="an arena must begin at a multiple of 16 bytes"):
        harness.device.pin(np.zeros(32, np.uint8)[1:])
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


def test_pages_that_are_not_on_a_gpu_are_refused():
    with pytest.raises(Unsupported, match="supports only pages in GPU memory"):
        DeviceHarness(CudaDevice(CudaOptions()), "cpu", Setup())


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3"])
@pytest.mark.parametrize("offset", [0, 64])
def test_aligned_pages_of_a_real_model_s_widths(dtype, offset):
    """These widths allow accesses of 16 bytes; the widths of the other tests do not."""
    rotations = (
        Rotary(width=64, offset=offset),
        Rotary(width=128),
        Rotary(width=64, offset=offset, neox=False),
    )
    sizes = {"kv_heads": 2, "key_dim": 128, "value_dim": 128, "block_size": 16, "chunk_tokens": 32, "n_blocks": 8}
    harness = harness_of(Setup(dtype=dtype, rotations=rotations, **sizes))
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


def test_refused_segments_launch_no_kernel(harness, monkeypatch):
    def launch(*_):
        raise AssertionError("a kernel was launched")

    monkeypatch.setattr(RUNTIME, "launch", launch)
    harness.block_ids[5] = -1
    for segments in (harness.chunks(0, 60), [harness.segment(0, 5), harness.segment(40, 44)]):
        with pytest.raises(InvalidInput):
            harness.device.load(segments, harness.block_ids)
        with pytest.raises(InvalidInput):
            harness.device.save(segments, harness.block_ids)
    harness.check()
