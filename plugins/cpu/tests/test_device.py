"""What the CPU device does beyond the contract: it copies neighbouring blocks at once, and how far off keys are."""

import numpy as np
import pytest
import torch
from blendhub_cpu import CpuOptions
from blendhub_cpu.device import CpuDevice
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from blendhub.contracts import PagedLayer, Segment
from blendhub.core.errors import Unsupported
from blendhub.core.layout import KVLayout
from blendhub.core.spans import Span
from blendhub.devices import pairs_of, torch_type
from blendhub.testing.devices.device_harness import DeviceHarness, DeviceSetup, Rotary


def harness_of(**fields):
    return DeviceHarness(CpuDevice(CpuOptions()), "cpu", DeviceSetup(**fields))


def test_block_tokens_is_an_option():
    assert CpuDevice(CpuOptions(block_tokens=5)).block_tokens == 5


@pytest.mark.parametrize("table", [[7, 8, 9, 10, 11], [3, 4, 9, 10, 2], [9, 1, 7, 3, 5]])
def test_blocks_that_follow_each_other_and_those_that_do_not(table):
    for start, end in ((0, 40), (8, 32), (3, 39), (17, 19)):
        harness = harness_of(rotations=(Rotary(), None), chunk_tokens=40)
        harness.block_ids = np.array(table)
        harness.load([harness.segment(start, end, source=500)])
        harness.overwrite_pages()
        harness.save([harness.segment(start, end)])


LONGEST = 2**17
FP8 = {"float8_e4m3": (2.0**-4, 2.0**-10), "float8_e5m2": (2.0**-3, 2.0**-17)}
"""The rounding error: relative to a number, and for the smallest numbers."""


@given(
    st.sampled_from(list(FP8)),
    st.booleans(),
    st.tuples(st.integers(0, LONGEST - 8), st.integers(0, LONGEST - 8)),
    st.integers(0, 2**32 - 1),
    st.floats(0.01, 200.0),
)
@settings(deadline=None, max_examples=60)
def test_moved_keys_of_8_bits_are_off_by_at_most_twice_the_rounding(dtype, neox, positions, seed, size):
    """The model rounds a key once. A moved key was rounded where it was stored, and again where it went."""
    (relative, smallest), kind, (old, new) = FP8[dtype], torch_type(dtype), positions
    rotation = Rotary(width=64, neox=neox, positions=LONGEST).build()
    layout = KVLayout(layers=1, kv_heads=2, key_dim=64, value_dim=64, dtype=dtype, chunk_tokens=8)
    pages = torch.zeros(LONGEST // 16, 2, 16, 128, dtype=kind)
    device, most = CpuDevice(CpuOptions()), torch.finfo(kind).max
    device.attach([PagedLayer("layer", "packed_heads", (pages,), rotation)], 16, layout)
    keys = torch.randn(8, 2, 64, generator=torch.Generator().manual_seed(seed)).double() * size
    first, second = pairs_of(keys, neox)
    at_old, at_new, norm = (torch.empty_like(keys) for _ in range(3))
    for target, start in ((at_old, old), (at_new, new)):
        cos, sin = rotation.cos_sin[start : start + 8, None].double().chunk(2, -1)
        one, other = pairs_of(target, neox)
        one.copy_(first * cos - second * sin)
        other.copy_(second * cos + first * sin)
    for half in pairs_of(norm, neox):
        half.copy_((first.square() + second.square()).sqrt())
    rows = torch.cat([at_old.clamp(-most, most).to(kind).flatten(), torch.zeros(8 * 2 * 64).to(kind)])
    device.pin(rows.view(torch.uint8).numpy())
    device.load([Segment(Span(new, new + 8), 0, 0, old)], np.arange(LONGEST // 16))
    at = torch.arange(new, new + 8)
    error = (pages[at // 16, :, at % 16, :64].double() - at_new.clamp(-most, most)).abs()
    bound = (2 * relative + relative**2) * norm * (1 + 1e-5) + 3 * smallest
    saturated = norm > most  # an item of the stored key may have been cut off
    assert ((error <= bound) | (new != old) & saturated).all()


def test_pages_on_another_device_are_refused():
    harness = harness_of()
    layers = [replace(layer, tensors=tuple(t.to("meta") for t in layer.tensors)) for layer in harness.layers]
    with pytest.raises(Unsupported, match=r"lie on meta.*choose another device"):
        CpuDevice(CpuOptions()).attach(layers, harness.setup.block_size, harness.layout)
