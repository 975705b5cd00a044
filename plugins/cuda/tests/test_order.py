"""Synchronisation of the CUDA device, tested with a runtime that defers all work until something waits for it."""

import ctypes
import logging
from itertools import product

import msgspec
import numpy as np
import pytest
import torch
from blendhub_cuda import CudaOptions
from blendhub_cuda.device import CudaDevice
from blendhub_cuda.records import ORIGIN

from blendhub.core.errors import Unsupported
from blendhub.devices.queues import StagingStream
from blendhub.testing.devices.device_harness import DeviceHarness, Rotary, Setup
from blendhub.testing.devices.slow_registration import SlowRegistration
from blendhub.testing.devices.streams import DeferredRuntime, StreamSuite, run_pending_transfers, wait_until_pinned

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled for the GPU here"),
]

SMALL_STAGING = 0.17
"""MiB of staging: one layer of a chunk in each stream, so that a chunk passes through each stream several times."""


def device_on(runtime, staging_mib=SMALL_STAGING):
    return CudaDevice(CudaOptions(staging_mib=staging_mib), lambda device: runtime)


def harness_on(runtime, staging_mib=SMALL_STAGING, wait=True):
    setup = Setup(rotations=(Rotary(),) * 3, chunk_tokens=40, n_blocks=40, n_shards=8)
    harness = DeviceHarness(device_on(runtime, staging_mib), "cpu", setup)
    if wait:
        wait_until_pinned(harness)
    return harness


class TestCudaStreams(StreamSuite):
    formats = CudaDevice.formats

    def create(self, runtime):
        return device_on(runtime)


@pytest.mark.parametrize("error", [None, "no more locked memory"], ids=["pinned", "bounce buffers"])
def test_staging_that_holds_several_chunks(error):
    harness = harness_on(DeferredRuntime(error), staging_mib=32)
    run_pending_transfers(harness)
    harness.device.close()


@pytest.mark.parametrize("transfer", ["load", "save"])
def test_using_the_bounce_buffer_too_early_is_caught(monkeypatch, transfer):
    monkeypatch.setattr(StagingStream, "wait_for_bounce_copy", lambda stream: None)
    harness = harness_on(DeferredRuntime("no more locked memory"))
    with pytest.raises(AssertionError):
        getattr(harness, transfer)(harness.chunks(0, 160))


class CheckedAddresses(SlowRegistration):
    """Refuses kernels rows of the arena that are not registered."""

    def __init__(self):
        super().__init__()
        self.n_direct = 0
        self.arena = np.empty(0, np.uint8)
        self.shard_bytes = 0

    def launch(self, stream, kernel, arguments):
        super().launch(stream, kernel, arguments)
        if arguments["base"] == self.arena.ctypes.data:
            n_words = arguments["TILE_WORDS"] * kernel.grid[0]
            pinned = sum(map(len, self.registered))

            def check():
                tiles = np.ctypeslib.as_array((ctypes.c_int64 * n_words).from_address(arguments["tiles"]))
                last = tiles.reshape(-1, arguments["TILE_WORDS"])[:, ORIGIN].max()
                self.n_direct += 1
                if last + self.shard_bytes > pinned:
                    self.errors.append(f"a kernel got rows at {last}, of {pinned} bytes that are pinned")

            stream.submit(check)


def test_kernels_reach_only_what_is_pinned():
    runtime = CheckedAddresses()
    harness = harness_on(runtime, wait=False)
    runtime.arena, runtime.shard_bytes = harness.arena, harness.layout.shard_bytes
    parts = [harness.segment(7, 30, shard=0, row=2), harness.segment(40, 70, shard=3)]
    runtime.wait_for_call()
    for n_next in (3, 3, 6, 1):
        for some in (parts[:1], parts):
            harness.load(some, 9)
            harness.overwrite_pages()
            harness.save(some)
        runtime.allow(n_next)
    assert runtime.n_direct and not runtime.errors
    runtime.allow_soon(1)
    harness.device.close()


class CountingVariants(DeferredRuntime):
    """Notes each kernel with its constants, each of which the compiler compiles once."""

    def __init__(self, variants=None):
        super().__init__()
        self.variants = set() if variants is None else variants

    def launch(self, stream, kernel, arguments):
        changing = ("base", "tiles", "planes")
        constants = {name: str(value) for name, value in arguments.items() if name not in changing}
        self.variants.add((kernel.kernel.__name__, *constants.items()))
        super().launch(stream, kernel, arguments)


@pytest.mark.parametrize("staging_mib", [SMALL_STAGING, 32])
def test_serving_compiles_nothing(staging_mib):
    """Shards may lie at any multiple of an item."""
    runtime = CountingVariants()
    sizes = {"kv_heads": 2, "key_dim": 8, "value_dim": 8, "chunk_tokens": 40, "n_blocks": 40, "n_shards": 8}
    setup = Setup(dtype="float16", rotations=(Rotary(),) * 3, **sizes)
    harness = DeviceHarness(device_on(runtime, staging_mib), "cpu", setup)
    compiled = set(runtime.variants)
    assert len(compiled) == 4
    for shift in (0, 2, 4, 8, 16, 32):
        for start, end in ((0, 80), (3, 50)):
            segments = [msgspec.structs.replace(one, shard=one.shard + shift) for one in harness.chunks(start, end)]
            harness.load(segments, 5)
            harness.save(segments)
    assert runtime.variants == compiled
    harness.device.close()


@pytest.mark.parametrize("widths", [[], [8]], ids=["one rotary embedding", "two of different widths"])
def test_the_adapter_s_start_compiles_what_any_rotation_found_by_its_checks_needs(widths):
    model_check = pytest.importorskip("blendhub.vllm.model.model_check", reason="the adapter needs vLLM; `make setup`")
    from blendhub.vllm.model.pages import paged_layer
    from blendhub.vllm.worker.worker_start import compile_kernels
    from tests.vllm.stand_in_model import StandInModel, rotary

    model = StandInModel()
    model.module.others = torch.nn.ModuleList(rotary(width=width) for width in widths)
    layout, rotations = model_check.layout_and_rotations(model, 32)
    compiled, used = set(), set()
    compile_kernels(lambda: device_on(CountingVariants(compiled), 64), model, layout, rotations)
    assert len(rotations) == 2 * (1 + len(widths))
    for chosen in product([None, *rotations], repeat=2):
        device = device_on(CountingVariants(used), 64)
        device.attach([paged_layer(model, index, one) for index, one in enumerate(chosen)], model.page_size, layout)
        device.close()
    assert used == compiled


def test_an_arena_that_cannot_be_pinned_is_logged_once(caplog):
    with caplog.at_level(logging.WARNING):
        harness = harness_on(DeferredRuntime("no more locked memory"))
    (line,) = [record.getMessage() for record in caplog.records]
    assert "no more locked memory" in line and "ulimit -l" in line
    harness.device.close()


def test_kernels_that_do_not_compile_refuse_the_device(monkeypatch):
    def fail(*_):
        raise RuntimeError("PassManager::run failed")

    monkeypatch.setattr(DeferredRuntime, "launch", fail)
    with pytest.raises(Unsupported, match="'cuda' cannot be set up on cpu: RuntimeError: PassManager::run failed"):
        harness_on(DeferredRuntime())
