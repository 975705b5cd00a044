"""Synchronisation of the CUDA device, tested with a runtime that defers all work until something waits for it."""

from itertools import product

import pytest
import torch
from blendhub_cuda import CudaOptions, kernels
from blendhub_cuda.device import CudaDevice
from blendhub_cuda.launcher import Launcher
from msgspec.structs import replace

from blendhub.core.errors import Unsupported
from blendhub.devices.queues import StagingStream
from blendhub.testing.devices.deferred import DeferredRuntime, SlowRegistration
from blendhub.testing.devices.device_harness import DeviceHarness, DeviceSetup, Rotary
from blendhub.testing.devices.streams import StreamSuite

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled for the GPU here"),
]

SMALL_STAGING = 0.06
"""MiB of staging: one layer of a chunk in each stream, so that a chunk passes through each stream several times."""


def device_on(runtime, staging_mib=SMALL_STAGING):
    return CudaDevice(CudaOptions(staging_mib=staging_mib), lambda device: runtime)


class TestCudaStreams(StreamSuite):
    formats = CudaDevice.formats

    def create(self, runtime):
        return device_on(runtime)


def harness_on(runtime, **fields):
    sizes = {"rotations": (Rotary(),) * 3, "chunk_tokens": 40, "n_blocks": 40, "n_shards": 8}
    return DeviceHarness(device_on(runtime), "cpu", DeviceSetup(**{**sizes, **fields}))


@pytest.mark.parametrize("transfer", ["load", "save"])
def test_using_the_bounce_buffer_too_early_is_caught(monkeypatch, transfer):
    monkeypatch.setattr(StagingStream, "wait_for_bounce_copy", lambda stream: None)
    harness = harness_on(DeferredRuntime("no more locked memory"))
    with pytest.raises(AssertionError):
        getattr(harness, transfer)(harness.chunks(0, 160))


def test_kernels_reach_only_what_is_pinned(monkeypatch):
    """Parts of chunks whose shards are pinned, and aligned as kernels want, do not go through staging."""
    runtime, seen, launch = SlowRegistration(), [], Launcher._launch

    def note(launcher, memory, table, batch, **constants):
        if not batch.slices and batch.n_tokens:
            pinned = sum(map(len, runtime.registered))
            seen.append(batch.rows.at + harness.layout.shard_bytes <= pinned and batch.rows.at % 16 == 0)
        launch(launcher, memory, table, batch, **constants)

    monkeypatch.setattr(Launcher, "_launch", note)
    harness = harness_on(runtime)
    shard_bytes = harness.layout.shard_bytes
    parts = [replace(harness.segment(7 + 40 * n, 30 + 40 * n, row=n), shard=n * shard_bytes) for n in range(3)]
    parts.append(replace(harness.segment(170, 180), shard=3 * shard_bytes + 4))
    runtime.wait_for_call()
    for n_next in (3, 3, 6, 1):
        harness.load(parts, 9)
        harness.overwrite_pages()
        harness.save(parts)
        runtime.allow(n_next)
    assert seen and all(seen)
    runtime.allow_soon(1)
    harness.device.close()


@pytest.fixture
def compiled(monkeypatch):
    """The arguments of all launches by which the compiler tells one kernel from another."""
    found, launch = set(), Launcher._launch

    def note(launcher, *given, **constants):
        found.add(tuple((name, str(value)) for name, value in {**launcher._constants, **constants}.items()))
        launch(launcher, *given, **constants)

    monkeypatch.setattr(Launcher, "_launch", note)
    return found


def test_serving_compiles_nothing(compiled):
    """Shards may lie at any multiple of an item."""
    harness = harness_on(DeferredRuntime(), dtype="float16", kv_heads=2, key_dim=8, value_dim=8)
    at_attach = set(compiled)
    assert len(at_attach) == 2
    for shift in (0, 2, 4, 8, 16, 32):
        for start, end in ((0, 80), (3, 50)):
            segments = [replace(one, shard=one.shard + shift) for one in harness.chunks(start, end)]
            harness.load(segments, 5)
            harness.save(segments)
    assert compiled == at_attach
    harness.device.close()


def test_the_adapter_s_start_compiles_what_any_rotation_found_by_its_checks_needs(compiled):
    model_check = pytest.importorskip(
        "blendhub.vllm.model.checks.model_check", reason="the adapter needs vLLM; `make setup`"
    )
    from blendhub.vllm.model.layer_groups import attach, pages_of
    from blendhub.vllm.worker.worker_start import compile_kernels
    from tests.vllm.stand_in_model import StandInModel, rotary

    model = StandInModel()
    model.module.others = torch.nn.ModuleList([rotary(width=8)])
    groups, rotations = model_check.groups_and_rotations(model, 32)
    compile_kernels(lambda: device_on(DeferredRuntime(), 64), model, groups, rotations)
    assert len(rotations) == 4
    at_start = set(compiled)
    for chosen in product([None, *rotations], repeat=2):
        device = device_on(DeferredRuntime(), 64)
        attach(device, groups, pages_of(model, groups, chosen))
        device.close()
    assert compiled == at_start


def test_kernels_that_do_not_compile_refuse_the_device(monkeypatch):
    monkeypatch.setattr(kernels, "copy_tokens", None)
    with pytest.raises(Unsupported, match="'cuda' cannot be set up on cpu: TypeError"):
        harness_on(DeferredRuntime())
