"""What is this device's own: its options, and what it refuses beyond the contract."""

from unittest import mock

import blendhub_cuda
import msgspec
import numpy as np
import pytest
import torch
from blendhub_cuda.deferred import DeferredRuntime
from blendhub_cuda.device import CudaDevice
from blendhub_cuda.options import CudaOptions
from blendhub_cuda.runtime import CudaRuntime

from blendhub.errors import InvalidInput, Unsupported
from blendhub.testing.devices.world import Setup, Turning, World

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
RUNTIME = CudaRuntime if HAS_GPU else DeferredRuntime

replace = msgspec.structs.replace


def device_of(**options):
    return CudaDevice(CudaOptions(**options), RUNTIME)


def world_of(setup=None, **options):
    return World(device_of(**options), DEVICE, setup or Setup())


@pytest.fixture
def world():
    made = world_of()
    yield made
    made.device.close()


def test_block_tokens_is_an_option():
    assert device_of(block_tokens=5).block_tokens == 5


def test_staging_is_bounded_by_its_option(world):
    told = world.device.describe()
    assert told["staging_bytes"] <= 64 * 2**20
    assert told["arena"] == "pinned"


def test_too_little_staging_is_told_with_what_is_enough():
    setup = Setup(chunk_tokens=256)
    with pytest.raises(InvalidInput, match=r"staging_mib = 0\.1 is too little.*set it to") as told:
        world_of(setup, staging_mib=0.1)
    enough = float(str(told.value).split("set it to ")[1].split()[0])
    world = world_of(setup, staging_mib=enough)
    world.load(world.chunks(0, 80))
    world.device.close()


def test_an_arena_may_come_before_the_pages(world):
    device = device_of()
    device.pin(world.arena)
    device.attach(world.layers, world.setup.block_size, world.layout)
    world.device.close()
    world.device = device
    world.load(world.chunks(3, 60))


@pytest.mark.parametrize(
    "arena",
    [np.zeros(16, np.int8), np.zeros((3, 16), np.uint8), np.zeros(32, np.uint8)[::2], np.zeros(32, np.uint8)[1:]],
    ids=["type", "2d", "gaps", "odd address"],
)
def test_an_arena_is_flat_bytes_at_an_even_address(world, arena):
    with pytest.raises(InvalidInput, match="an arena "):
        world.device.pin(arena)
    world.load(world.chunks(3, 60))


def test_what_is_refused_never_reaches_the_gpu(world, monkeypatch):
    def launch(*_):
        raise AssertionError("a kernel was launched")

    monkeypatch.setattr(RUNTIME, "launch", launch)
    world.block_ids[5] = -1
    for segments in (world.chunks(0, 60), [world.segment(0, 5), world.segment(40, 44)]):
        with pytest.raises(InvalidInput):
            world.device.load(segments, world.block_ids)
        with pytest.raises(InvalidInput):
            world.device.save(segments, world.block_ids)
    world.check()


def test_pages_that_are_not_on_a_gpu_are_refused():
    with pytest.raises(Unsupported, match="serves only GPUs"):
        World(CudaDevice(CudaOptions()), "cpu", Setup())


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3"])
@pytest.mark.parametrize("offset", [0, 64])
def test_aligned_pages_of_a_real_model_s_widths(dtype, offset):
    """With accesses of 16 bytes, which small and odd widths do not have."""
    turnings = (Turning(width=64, offset=offset), Turning(width=128), Turning(width=64, offset=offset, neox=False))
    sizes = {"kv_heads": 2, "key_dim": 128, "value_dim": 128, "block_size": 16, "chunk_tokens": 32, "n_blocks": 8}
    world = world_of(Setup(dtype=dtype, turnings=turnings, **sizes))
    segments = [replace(one, shard=number * world.layout.shard_bytes) for number, one in enumerate(world.chunks(3, 80))]
    world.load([replace(one, source_start=one.span.start + 200) for one in segments], skip_prefix_n_tokens=7)
    world.overwrite_pages()
    world.save(segments)
    world.device.close()


@pytest.mark.parametrize(
    "cuda, hip, told, command",
    [
        (None, None, "for CPUs only", "pip install --force-reinstall 'torch>=2.6'"),
        ("12.8", None, "finds no GPU", "nvidia-smi"),
        (None, "6.4", "finds no GPU", "rocm-smi"),
    ],
)
def test_the_probe_says_why_it_cannot_run_here(cuda, hip, told, command):
    with (
        mock.patch.object(torch.cuda, "is_available", lambda: False),
        mock.patch.object(torch.version, "cuda", cuda),
        mock.patch.object(torch.version, "hip", hip),
    ):
        (spec,) = blendhub_cuda.blendhub_plugins()
        unavailable = spec.probe()
    assert told in unavailable.reason and unavailable.command == command


def test_the_probe_misses_triton(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(blendhub_cuda, "find_spec", lambda name: None if name == "triton" else name)
    (spec,) = blendhub_cuda.blendhub_plugins()
    assert "Triton is not installed" in spec.probe().reason
