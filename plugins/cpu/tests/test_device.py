"""Options and errors of the CPU device that the contract does not cover."""

import numpy as np
import pytest
import torch
from blendhub_cpu import CpuOptions
from blendhub_cpu.device import CpuDevice
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from blendhub.contracts import PagedLayer, Rotation, Segment
from blendhub.core.errors import Unsupported
from blendhub.core.layout import KVLayout
from blendhub.core.spans import Span
from blendhub.devices import pairs_of
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


LONGEST = 2**17
FP8 = {"float8_e4m3": (torch.float8_e4m3fn, 2.0**-4, 2.0**-10), "float8_e5m2": (torch.float8_e5m2, 2.0**-3, 2.0**-17)}
"""The torch dtype, and the rounding error: relative to a number, and for the smallest numbers."""


@pytest.fixture(scope="module")
def table():
    """The angles of a head of 64 items with base 10,000, computed as models do."""
    frequencies = 10_000.0 ** -(torch.arange(0, 64, 2, dtype=torch.float32) / 64)
    angles = torch.arange(LONGEST, dtype=torch.float32)[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], -1)


@given(
    st.sampled_from(list(FP8)),
    st.booleans(),
    st.integers(0, LONGEST - 8),
    st.integers(0, LONGEST - 8),
    st.integers(0, 2**32 - 1),
    st.floats(0.01, 200.0),
)
@settings(deadline=None, max_examples=60)
def test_moved_keys_of_8_bits_are_off_by_at_most_twice_the_rounding(table, dtype, neox, old, new, seed, size):
    """The model rounds a key once. A moved key was rounded where it was stored, and again where it went."""
    kind, relative, smallest = FP8[dtype]
    turned = Rotation(table, neox)
    layout = KVLayout(layers=1, kv_heads=2, key_dim=64, value_dim=64, dtype=dtype, chunk_tokens=8)
    pages = torch.zeros(LONGEST // 16, 2, 16, 128, dtype=kind)
    device = CpuDevice(CpuOptions())
    device.attach([PagedLayer("layer", "packed_heads", (pages,), turned)], 16, layout)
    unturned = torch.randn(8, 2, 64, generator=torch.Generator().manual_seed(seed)).double() * size
    at_old, at_new = (rotate(unturned, table[at : at + 8].double(), neox) for at in (old, new))
    most = torch.finfo(kind).max
    rows = torch.cat([at_old.clamp(-most, most).to(kind).flatten(), torch.zeros(8 * 2 * 64).to(kind)])
    device.pin(rows.view(torch.uint8).numpy())
    device.load([Segment(Span(new, new + 8), 0, 0, old)], np.arange(LONGEST // 16))
    at = torch.arange(new, new + 8)
    moved = pages[at // 16, :, at % 16, :64].double()
    first, second = pairs_of(unturned, neox)
    norm = torch.empty_like(unturned)
    for half in pairs_of(norm, neox):
        half.copy_((first.square() + second.square()).sqrt())
    bound = (2 * relative + relative**2) * norm * (1 + 1e-5) + 3 * smallest
    saturated = norm > most  # an item of the stored key may have been cut off
    assert (((moved - at_new.clamp(-most, most)).abs() <= bound) | (new != old) & saturated).all()


def rotate(keys, angles, neox):
    """Keys ``[tokens, heads, width]``, turned by the table's rows."""
    cos, sin = angles[:, None].chunk(2, -1)
    first, second = pairs_of(keys, neox)
    turned = torch.empty_like(keys)
    one, other = pairs_of(turned, neox)
    one.copy_(first * cos - second * sin)
    other.copy_(second * cos + first * sin)
    return turned


def test_pages_on_another_device_are_refused():
    harness = harness_of()
    layers = [replace(layer, tensors=tuple(t.to("meta") for t in layer.tensors)) for layer in harness.layers]
    with pytest.raises(Unsupported, match=r"lie on meta.*choose another device"):
        CpuDevice(CpuOptions()).attach(layers, harness.setup.block_size, harness.layout)
