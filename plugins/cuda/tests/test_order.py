"""What waits for what: with a runtime that runs nothing until something waits, a missing wait shows every time."""

import gc
import logging
import weakref

import numpy as np
import pytest
import torch
from blendhub_cuda.deferred import DeferredRuntime
from blendhub_cuda.device import CudaDevice
from blendhub_cuda.lanes import Lane
from blendhub_cuda.options import CudaOptions

from blendhub.testing.devices.device_harness import DeviceHarness, Rotary, Setup

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled for the GPU here")

SMALL = 0.17
"""MiB of staging: room for one layer of a chunk in each lane, so that a chunk goes through each several times."""


class Forgetful(DeferredRuntime):
    """Streams that do not wait for one another."""

    def follow(self, stream, mark):
        pass


def harness_of(runtime=DeferredRuntime, staging_mib=SMALL, **fields):
    setup = Setup(**{"rotations": (Rotary(),) * 3, "chunk_tokens": 40, "n_blocks": 40, "n_shards": 8, **fields})
    return DeviceHarness(CudaDevice(CudaOptions(staging_mib=staging_mib), runtime), "cpu", setup)


def unpinned(device):
    return DeferredRuntime(device, why_not_registered="no more locked memory")


def engine_of(harness):
    return harness.device._engine.runtime.engine


def defer_overwriting(harness):
    """As an engine writes its pages: on its stream, some time after it said so."""
    before = [[tensor.clone() for tensor in layer.tensors] for layer in harness.layers]
    harness.overwrite_pages()
    after = [[tensor.clone() for tensor in layer.tensors] for layer in harness.layers]
    put(harness, before)
    engine_of(harness).give(lambda: put(harness, after))


def put(harness, kept):
    for layer, tensors in zip(harness.layers, kept, strict=True):
        for tensor, one in zip(layer.tensors, tensors, strict=True):
            tensor.copy_(one)


def save_what_the_engine_is_about_to_write(harness):
    defer_overwriting(harness)
    harness.start_save(harness.chunks(0, 160)).wait()
    harness.check()


def load_over_what_the_engine_is_about_to_write(harness):
    defer_overwriting(harness)
    harness.start_load(harness.chunks(0, 160, source=50), 30).wait()
    harness.device._engine.runtime.wait(harness.device._engine.runtime.mark())
    harness.check()


@pytest.mark.parametrize("runtime", [DeferredRuntime, unpinned], ids=["pinned", "in pieces"])
@pytest.mark.parametrize(
    "transfer", [save_what_the_engine_is_about_to_write, load_over_what_the_engine_is_about_to_write]
)
def test_a_transfer_follows_the_engine(transfer, runtime):
    harness = harness_of(runtime)
    transfer(harness)
    harness.device.close()


@pytest.mark.parametrize(
    "transfer", [save_what_the_engine_is_about_to_write, load_over_what_the_engine_is_about_to_write]
)
def test_a_transfer_that_does_not_follow_the_engine_is_caught(transfer):
    harness = harness_of(Forgetful)
    with pytest.raises(AssertionError):
        transfer(harness)


def test_the_engine_s_later_work_is_not_waited_for():
    harness = harness_of()
    transfer = harness.start_save(harness.chunks(0, 160))
    later = engine_of(harness).give(lambda: None)
    transfer.wait()
    harness.check()
    assert not later.ran
    harness.device.close()


def test_nothing_is_done_before_it_is_waited_for():
    harness = harness_of()
    before = harness.arena.copy()
    transfer = harness.device.save(harness.chunks(0, 160), harness.block_ids)
    transfer._started.result()
    assert np.array_equal(harness.arena, before)
    transfer.wait()
    assert not np.array_equal(harness.arena, before)
    harness.device.close()


@pytest.mark.parametrize("runtime", [DeferredRuntime, unpinned], ids=["pinned", "in pieces"])
@pytest.mark.parametrize("staging_mib", [SMALL, 32])
def test_staging_is_used_many_times(runtime, staging_mib):
    """Several transfers under way at once, each longer than staging, or not."""
    harness = harness_of(runtime, staging_mib)
    chunks = harness.chunks(0, 240, source=100)
    transfers = [harness.start_load(chunks[:3], 10), harness.start_save([harness.segment(250, 290, shard=6)])]
    transfers += [harness.start_load(chunks[3:]), harness.start_save([harness.segment(290, 303, shard=7, row=9)])]
    for transfer in transfers[::-1]:
        transfer.wait()
    harness.check()
    harness.device.close()


@pytest.mark.parametrize("transfer", ["load", "save"])
def test_pieces_that_are_used_too_early_are_caught(monkeypatch, transfer):
    monkeypatch.setattr(Lane, "await_pieces", lambda lane: None)
    harness = harness_of(unpinned)
    with pytest.raises(AssertionError):
        getattr(harness, transfer)(harness.chunks(0, 160))


@pytest.mark.parametrize("segment", [(0, 40, 0), (0, 40, 1), (7, 47, 0), (3, 20, 5), (3, 4, 39)])
def test_in_pieces_only_the_rows_of_the_segment_are_saved(segment):
    start, end, row = segment
    for layout in ({}, {"format": "split", "value_dim": 5}, {"format": "latent"}):
        harness = harness_of(unpinned, **layout)
        harness.save([harness.segment(start, min(end, start + 40 - row), row=row, shard=2)])
        harness.device.close()


def test_an_arena_that_cannot_be_pinned_is_told_once(caplog):
    with caplog.at_level(logging.WARNING):
        harness = harness_of(unpinned)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "no more locked memory" in line and "ulimit -l" in line
    assert harness.device.describe()["arena"] == "copied through pinned pieces"
    harness.device.close()


def test_another_arena_is_pinned_when_the_first_is_free():
    harness = harness_of()
    runtime = harness.device._engine.runtime
    first = harness.arena
    harness.reference.save(harness.chunks(0, 160), harness.block_ids)
    expected = harness.expected_arena
    harness.device.save(harness.chunks(0, 160), harness.block_ids)
    harness.pin_new_arena()  # the runtime raises if copies of the first are still under way
    assert np.array_equal(first, expected)
    assert runtime.registered == [harness.arena.ctypes.data]
    harness.device.close()
    assert not runtime.registered


def test_a_failing_kernel_is_told_to_who_waits_and_the_device_lives_on(monkeypatch):
    harness = harness_of()
    launch = DeferredRuntime.launch

    def fail(*_):
        raise RuntimeError("the GPU is lost")

    monkeypatch.setattr(DeferredRuntime, "launch", fail)
    transfer = harness.device.load(harness.chunks(0, 160), harness.block_ids)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="lost"):
            transfer.wait()
    assert transfer.done()
    monkeypatch.setattr(DeferredRuntime, "launch", launch)
    harness.load(harness.chunks(0, 160))
    harness.device.close()


def test_a_save_that_failed_writes_nothing_later(monkeypatch):
    """Its bytes belong to somebody else by then."""
    harness = harness_of(unpinned)
    launch, left = DeferredRuntime.launch, iter(range(3))

    def fail_the_fourth(*arguments):
        if next(left, None) is None:
            raise RuntimeError("the GPU is lost")
        launch(*arguments)

    monkeypatch.setattr(DeferredRuntime, "launch", fail_the_fourth)
    with pytest.raises(RuntimeError, match="lost"):
        harness.device.save(harness.chunks(0, 160), harness.block_ids).wait()
    monkeypatch.setattr(DeferredRuntime, "launch", launch)
    harness.arena[:] = harness.expected_arena
    harness.save([harness.segment(200, 210, shard=7)])
    harness.device.close()


def test_a_transfer_that_nobody_waits_for_lets_go_of_its_arena():
    harness = harness_of()
    harness.device.save(harness.chunks(0, 160), harness.block_ids)
    watched = weakref.ref(harness.arena)
    harness.device.close()
    harness.arena = np.empty(0, np.uint8)
    gc.collect()
    assert watched() is None
