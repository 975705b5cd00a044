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

from blendhub.testing.devices.world import Setup, Turning, World

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled for the GPU here")

SMALL = 0.17
"""MiB of staging: room for one layer of a chunk in each lane, so that a chunk goes through each several times."""


class Forgetful(DeferredRuntime):
    """Streams that do not wait for one another."""

    def follow(self, stream, mark):
        pass


def world_of(runtime=DeferredRuntime, staging_mib=SMALL, **fields):
    setup = Setup(**{"turnings": (Turning(),) * 3, "chunk_tokens": 40, "n_blocks": 40, "n_shards": 8, **fields})
    return World(CudaDevice(CudaOptions(staging_mib=staging_mib), runtime), "cpu", setup)


def unpinned(device):
    return DeferredRuntime(device, why_not_registered="no more locked memory")


def engine_of(world):
    return world.device._engine.runtime.engine


def defer_overwriting(world):
    """As an engine writes its pages: on its stream, some time after it said so."""
    before = [[tensor.clone() for tensor in layer.tensors] for layer in world.layers]
    world.overwrite_pages()
    after = [[tensor.clone() for tensor in layer.tensors] for layer in world.layers]
    put(world, before)
    engine_of(world).give(lambda: put(world, after))


def put(world, kept):
    for layer, tensors in zip(world.layers, kept, strict=True):
        for tensor, one in zip(layer.tensors, tensors, strict=True):
            tensor.copy_(one)


def save_what_the_engine_is_about_to_write(world):
    defer_overwriting(world)
    world.start_save(world.chunks(0, 160)).wait()
    world.check()


def load_over_what_the_engine_is_about_to_write(world):
    defer_overwriting(world)
    world.start_load(world.chunks(0, 160, source=50), 30).wait()
    world.device._engine.runtime.wait(world.device._engine.runtime.mark())
    world.check()


@pytest.mark.parametrize("runtime", [DeferredRuntime, unpinned], ids=["pinned", "in pieces"])
@pytest.mark.parametrize(
    "transfer", [save_what_the_engine_is_about_to_write, load_over_what_the_engine_is_about_to_write]
)
def test_a_transfer_follows_the_engine(transfer, runtime):
    world = world_of(runtime)
    transfer(world)
    world.device.close()


@pytest.mark.parametrize(
    "transfer", [save_what_the_engine_is_about_to_write, load_over_what_the_engine_is_about_to_write]
)
def test_a_transfer_that_does_not_follow_the_engine_is_caught(transfer):
    world = world_of(Forgetful)
    with pytest.raises(AssertionError):
        transfer(world)


def test_the_engine_s_later_work_is_not_waited_for():
    world = world_of()
    transfer = world.start_save(world.chunks(0, 160))
    later = engine_of(world).give(lambda: None)
    transfer.wait()
    world.check()
    assert not later.ran
    world.device.close()


def test_nothing_is_done_before_it_is_waited_for():
    world = world_of()
    before = world.arena.copy()
    transfer = world.device.save(world.chunks(0, 160), world.block_ids)
    transfer._started.result()
    assert np.array_equal(world.arena, before)
    transfer.wait()
    assert not np.array_equal(world.arena, before)
    world.device.close()


@pytest.mark.parametrize("runtime", [DeferredRuntime, unpinned], ids=["pinned", "in pieces"])
@pytest.mark.parametrize("staging_mib", [SMALL, 32])
def test_staging_is_used_many_times(runtime, staging_mib):
    """Several transfers under way at once, each longer than staging, or not."""
    world = world_of(runtime, staging_mib)
    chunks = world.chunks(0, 240, source=100)
    transfers = [world.start_load(chunks[:3], 10), world.start_save([world.segment(250, 290, shard=6)])]
    transfers += [world.start_load(chunks[3:]), world.start_save([world.segment(290, 303, shard=7, row=9)])]
    for transfer in transfers[::-1]:
        transfer.wait()
    world.check()
    world.device.close()


@pytest.mark.parametrize("transfer", ["load", "save"])
def test_pieces_that_are_used_too_early_are_caught(monkeypatch, transfer):
    monkeypatch.setattr(Lane, "await_pieces", lambda lane: None)
    world = world_of(unpinned)
    with pytest.raises(AssertionError):
        getattr(world, transfer)(world.chunks(0, 160))


@pytest.mark.parametrize("segment", [(0, 40, 0), (0, 40, 1), (7, 47, 0), (3, 20, 5), (3, 4, 39)])
def test_in_pieces_only_the_rows_of_the_segment_are_saved(segment):
    start, end, row = segment
    for layout in ({}, {"format": "split", "value_dim": 5}, {"format": "latent"}):
        world = world_of(unpinned, **layout)
        world.save([world.segment(start, min(end, start + 40 - row), row=row, shard=2)])
        world.device.close()


def test_an_arena_that_cannot_be_pinned_is_told_once(caplog):
    with caplog.at_level(logging.WARNING):
        world = world_of(unpinned)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "no more locked memory" in line and "ulimit -l" in line
    assert world.device.describe()["arena"] == "copied through pinned pieces"
    world.device.close()


def test_another_arena_is_pinned_when_the_first_is_free():
    world = world_of()
    runtime = world.device._engine.runtime
    first = world.arena
    world.reference.save(world.chunks(0, 160), world.block_ids)
    expected = world.expected_arena
    world.device.save(world.chunks(0, 160), world.block_ids)
    world.pin_another()  # the runtime raises if copies of the first are still under way
    assert np.array_equal(first, expected)
    assert runtime.registered == [world.arena.ctypes.data]
    world.device.close()
    assert not runtime.registered


def test_a_failing_kernel_is_told_to_who_waits_and_the_device_lives_on(monkeypatch):
    world = world_of()
    launch = DeferredRuntime.launch

    def fail(*_):
        raise RuntimeError("the GPU is lost")

    monkeypatch.setattr(DeferredRuntime, "launch", fail)
    transfer = world.device.load(world.chunks(0, 160), world.block_ids)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="lost"):
            transfer.wait()
    assert transfer.done()
    monkeypatch.setattr(DeferredRuntime, "launch", launch)
    world.load(world.chunks(0, 160))
    world.device.close()


def test_a_save_that_failed_writes_nothing_later(monkeypatch):
    """Its bytes belong to somebody else by then."""
    world = world_of(unpinned)
    launch, left = DeferredRuntime.launch, iter(range(3))

    def fail_the_fourth(*arguments):
        if next(left, None) is None:
            raise RuntimeError("the GPU is lost")
        launch(*arguments)

    monkeypatch.setattr(DeferredRuntime, "launch", fail_the_fourth)
    with pytest.raises(RuntimeError, match="lost"):
        world.device.save(world.chunks(0, 160), world.block_ids).wait()
    monkeypatch.setattr(DeferredRuntime, "launch", launch)
    world.arena[:] = world.expected_arena
    world.save([world.segment(200, 210, shard=7)])
    world.device.close()


def test_a_transfer_that_nobody_waits_for_lets_go_of_its_arena():
    world = world_of()
    world.device.save(world.chunks(0, 160), world.block_ids)
    watched = weakref.ref(world.arena)
    world.device.close()
    world.arena = np.empty(0, np.uint8)
    gc.collect()
    assert watched() is None
