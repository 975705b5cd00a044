"""Synchronisation of the CUDA device, tested with a runtime that defers all work until something waits for it."""

import logging

import numpy as np
import pytest
import torch
from blendhub_cuda.device import CudaDevice
from blendhub_cuda.options import CudaOptions

from blendhub.devices.queues import StagingStream
from blendhub.testing.devices.device_harness import DeviceHarness, Rotary, Setup
from blendhub.testing.devices.streams import DeferredRuntime, StreamSuite, run_pending_transfers

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled for the GPU here")

SMALL_STAGING = 0.17
"""MiB of staging: one layer of a chunk in each stream, so that a chunk passes through each stream several times."""


def device_on(runtime, staging_mib=SMALL_STAGING):
    return CudaDevice(CudaOptions(staging_mib=staging_mib), lambda device: runtime)


def harness_on(runtime, staging_mib=SMALL_STAGING):
    setup = Setup(rotations=(Rotary(),) * 3, chunk_tokens=40, n_blocks=40, n_shards=8)
    return DeviceHarness(device_on(runtime, staging_mib), "cpu", setup)


class TestCudaStreams(StreamSuite):
    formats = CudaDevice.formats

    def create(self, runtime):
        return device_on(runtime)


@pytest.mark.parametrize("error", [None, "no more locked memory"], ids=["pinned", "bounce buffers"])
def test_staging_that_holds_several_chunks(error):
    harness = harness_on(DeferredRuntime(error), staging_mib=32)
    run_pending_transfers(harness)
    harness.device.close()


def test_the_deferred_runtime_runs_nothing_before_a_wait():
    harness = harness_on(DeferredRuntime())
    before = harness.arena.copy()
    transfer = harness.device.save(harness.chunks(0, 160), harness.block_ids)
    transfer._submitted.result()
    assert np.array_equal(harness.arena, before)
    transfer.wait()
    assert not np.array_equal(harness.arena, before)
    harness.device.close()


@pytest.mark.parametrize("transfer", ["load", "save"])
def test_using_the_bounce_buffer_too_early_is_caught(monkeypatch, transfer):
    monkeypatch.setattr(StagingStream, "wait_for_bounce_copy", lambda stream: None)
    harness = harness_on(DeferredRuntime("no more locked memory"))
    with pytest.raises(AssertionError):
        getattr(harness, transfer)(harness.chunks(0, 160))


def test_an_arena_that_cannot_be_pinned_is_logged_once(caplog):
    with caplog.at_level(logging.WARNING):
        harness = harness_on(DeferredRuntime("no more locked memory"))
    (line,) = [record.getMessage() for record in caplog.records]
    assert "no more locked memory" in line and "ulimit -l" in line
    assert not harness.device._arena.is_registered
    harness.device.close()
