"""Options, threads and errors of the CPU device that the contract does not cover."""

import os
import threading

import msgspec
import numpy as np
import pytest
from blendhub_cpu import device as module
from blendhub_cpu.device import CpuDevice, set_affinity, usable_cores
from blendhub_cpu.options import CpuOptions

from blendhub.core.errors import Unsupported
from blendhub.testing.devices.device_harness import DeviceHarness, Rotary, Setup

replace = msgspec.structs.replace


def harness_of(setup=None, **options):
    return DeviceHarness(CpuDevice(CpuOptions(**options)), "cpu", setup or Setup())


@pytest.fixture
def harness():
    made = harness_of()
    yield made
    made.device.close()


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_any_number_of_threads(threads):
    harness = harness_of(Setup(rotations=(Rotary(), None)), threads=threads)
    assert harness.device._attached.threads == threads
    assert harness.device._attached.pages.n_blocks == harness.setup.n_blocks
    harness.load(harness.chunks(3, 60, source=100))
    harness.save(harness.chunks(3, 60))
    harness.device.close()


def test_block_tokens_is_an_option():
    assert CpuDevice(CpuOptions(block_tokens=5)).block_tokens == 5


def test_shards_may_begin_at_any_byte(harness):
    at = harness.shard(1) + 1
    segment = replace(harness.segment(3, 20), shard=at)
    harness.device.save([segment], harness.block_ids).wait()
    keys = np.frombuffer(harness.arena[at : at + harness.layout.key_row_bytes].tobytes(), np.float32)
    block, slot = harness.block_ids[0], 3
    np.testing.assert_array_equal(keys, harness.layers[0].tensors[0][block, :, slot, :12].numpy().ravel())


def test_wait_raises_the_error_of_a_failed_copy(harness, monkeypatch):
    def fail(*_):
        raise MemoryError("no room for a block of keys")

    monkeypatch.setattr(module.kernels, "rows_to_pages", fail)
    transfer = harness.device.load(harness.chunks(0, 60), harness.block_ids)
    for _ in range(2):
        with pytest.raises(MemoryError):
            transfer.wait()
    assert transfer.done()


def test_pages_on_another_device_are_refused():
    harness = harness_of()
    harness.device.close()
    layers = [replace(layer, tensors=tuple(t.to("meta") for t in layer.tensors)) for layer in harness.layers]
    with pytest.raises(Unsupported, match=r"lie on meta.*choose another device"):
        CpuDevice(CpuOptions()).attach(layers, harness.setup.block_size, harness.layout)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity of threads")
def test_threads_use_the_cores_of_all_threads_of_the_process():
    allowed = os.sched_getaffinity(0)
    if len(allowed) < 2:
        pytest.skip("there is one core only")
    release, found = threading.Event(), []
    free = threading.Thread(target=release.wait)
    free.start()
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert usable_cores() == allowed
        pinned = threading.Thread(target=lambda: (set_affinity(allowed), found.append(os.sched_getaffinity(0))))
        pinned.start()
        pinned.join()
    finally:
        os.sched_setaffinity(0, allowed)
        release.set()
        free.join()
    assert found == [allowed]
