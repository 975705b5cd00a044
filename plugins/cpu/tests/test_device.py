"""Options and errors of the CPU device that the contract does not cover."""

import numpy as np
import pytest
from blendhub_cpu import CpuOptions
from blendhub_cpu.device import CpuDevice
from msgspec.structs import replace

from blendhub.core.errors import Unsupported
from blendhub.testing.devices.device_harness import DeviceHarness, DeviceSetup, Rotary


def harness_of(**fields):
    return DeviceHarness(CpuDevice(CpuOptions()), "cpu", DeviceSetup(**fields))


def test_block_tokens_is_an_option():
    assert CpuDevice(CpuOptions(block_tokens=5)).block_tokens == 5


def test_shards_may_begin_at_any_multiple_of_an_item():
    harness = harness_of(dtype="float16")
    segment = replace(harness.segment(3, 20), shard=harness.shard(1) + 2)
    harness.save([segment])
    harness.overwrite_pages()
    harness.load([segment])


@pytest.mark.parametrize("table", [[7, 8, 9, 10, 11], [3, 4, 9, 10, 2], [9, 1, 7, 3, 5]])
def test_blocks_that_follow_each_other_and_those_that_do_not(table):
    for start, end in ((0, 40), (8, 32), (3, 39), (17, 19)):
        harness = harness_of(rotations=(Rotary(), None), chunk_tokens=40)
        harness.block_ids = np.array(table)
        harness.load([harness.segment(start, end, source=500)])
        harness.overwrite_pages()
        harness.save([harness.segment(start, end)])


def test_pages_on_another_device_are_refused():
    harness = harness_of()
    layers = [replace(layer, tensors=tuple(t.to("meta") for t in layer.tensors)) for layer in harness.layers]
    with pytest.raises(Unsupported, match=r"lie on meta.*choose another device"):
        CpuDevice(CpuOptions()).attach(layers, harness.setup.block_size, harness.layout)
