"""Pages of CPUs with AMX, which vLLM uses for bfloat16: what its own kernel writes is read, saved, loaded and moved.

The arithmetic of tiles is tested on every processor, against a loop over single items, by the suite of devices.
"""

import numpy as np
import pytest
import torch
from blendhub_cpu import CpuOptions
from blendhub_cpu.device import CpuDevice
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm import _custom_ops as ops

from blendhub.contracts import PagedLayer, Rotation, Segment
from blendhub.core.layout import KVLayout
from blendhub.core.spans import Span
from blendhub.testing.devices.device_harness import Rotary
from blendhub.vllm.model import layer_groups
from blendhub.vllm.model.checks.model_check import _check_layout
from blendhub.vllm.model.pages import LayerPages, read
from blendhub.vllm.model.rotary import rotated
from tests.vllm.stand_in_model import StandInModel

if not hasattr(ops, "cpu_attn_reshape_and_cache"):
    pytest.skip("this vLLM was not built for CPUs", allow_module_level=True)

N_BLOCKS = 5
DTYPES = {"auto": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn}


def write(pages, keys, values, slots, dtype="auto", instructions="amx"):
    """Writes as vLLM's layer does."""
    n, heads, block, _ = pages.shape
    kept = pages.view(torch.uint8) if dtype != "auto" else pages
    key_pages, value_pages = kept.view(n, heads, 2 * block, -1).chunk(2, dim=2)
    scales = {"k_scale": 1.0, "v_scale": 1.0}
    ops.cpu_attn_reshape_and_cache(
        keys, values, key_pages, value_pages, slots, instructions, **scales, kv_cache_dtype=dtype
    )


def pages_of(heads, block, width, dtype="auto"):
    return torch.zeros(N_BLOCKS, heads, block, 2 * width, dtype=DTYPES[dtype])


def layer_of(pages, rotation=None):
    n, heads, block, both = pages.shape
    return PagedLayer("layer", "packed_tiles", (pages.view(n, heads, block * both),), rotation)


def numbers(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def layout(heads, width, dtype="bfloat16"):
    return KVLayout(layers=1, kv_heads=heads, key_dim=width, value_dim=width, dtype=dtype, chunk_tokens=64)


def refusal():
    """What vLLM's kernel says of this processor; empty: it writes tiles here."""
    try:
        write(pages_of(1, 32, 32), numbers(1, 1, 1, 32), numbers(2, 1, 1, 32), torch.tensor([0]))
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""


REFUSAL = refusal()
needs_tiles = pytest.mark.skipif(bool(REFUSAL), reason=f"vLLM's kernel writes no tiles here: {REFUSAL}")
shapes = st.tuples(st.integers(1, 3), st.sampled_from([32, 64, 96]), st.sampled_from([32, 64, 96, 128]))


@needs_tiles
@given(shapes, st.sampled_from(list(DTYPES)), st.integers(0, 2**32 - 1), st.data())
@settings(deadline=None, max_examples=60)
def test_what_the_kernel_writes_is_read_back(shape, dtype, seed, data):
    heads, block, width = shape
    slots = torch.tensor(data.draw(st.lists(st.integers(0, N_BLOCKS * block - 1), min_size=1, unique=True)))
    pages = pages_of(heads, block, width, dtype)
    # Numbers of the pages, which no kernel rounds.
    keys, values = numbers(seed, 2, len(slots), heads, width).to(DTYPES[dtype]).bfloat16()
    write(pages, keys, values, slots, dtype)
    found = read(LayerPages(layer_of(pages), layout(heads, width), block), slots)
    for given_, there in zip((keys, values), found, strict=True):
        assert torch.equal(given_, there.bfloat16())


@needs_tiles
@given(shapes, st.integers(0, 150), st.integers(1, 64), st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=60)
def test_what_the_device_loads_and_saves_is_what_the_kernel_writes(shape, start, n, seed):
    """Whole blocks and parts of blocks, in blocks that follow each other and those that do not."""
    heads, block, width = shape
    n = min(n, N_BLOCKS * block - start)
    if n < 1:
        return
    shard = layout(heads, width)
    keys, values = numbers(seed, 2, 64, heads, width)
    arena = torch.cat([keys.flatten(), values.flatten()]).view(torch.uint8).numpy().copy()
    table = np.array([0, 1, 4, 3, 2])
    pages, expected = pages_of(*shape), pages_of(*shape)
    device = CpuDevice(CpuOptions())
    device.attach([layer_of(pages)], block, shard)
    device.pin(arena)
    segment = [Segment(Span(start, start + n), 0, 0, start)]
    device.load(segment, table)
    at = np.arange(start, start + n)
    slots = torch.from_numpy(table[at // block] * block + at % block)
    write(expected, keys[:n], values[:n], slots)
    assert torch.equal(pages.view(torch.int16), expected.view(torch.int16))
    before = arena.copy()
    arena[:] = 0
    device.save(segment, table)
    row_bytes = 2 * heads * width
    for part in (0, 64 * row_bytes):
        assert np.array_equal(arena[part : part + n * row_bytes], before[part : part + n * row_bytes])
    assert arena.any() and not arena[n * row_bytes : 64 * row_bytes].any()


@needs_tiles
@pytest.mark.parametrize("neox", [True, False])
def test_moved_keys_are_turned_in_their_tiles(neox):
    heads, block, width = 2, 32, 64
    turned: Rotation = Rotary(width=64, neox=neox, positions=2**15).build()
    keys, values = numbers(3, 2, 64, heads, width)
    arena = torch.cat([keys.flatten(), values.flatten()]).view(torch.uint8).numpy()
    pages = pages_of(heads, block, width)
    device = CpuDevice(CpuOptions())
    device.attach([layer_of(pages, turned)], block, layout(heads, width))
    device.pin(arena)
    device.load([Segment(Span(70, 130), 0, 0, 20_000)], np.arange(N_BLOCKS))
    expected = pages_of(heads, block, width)
    new = torch.arange(70, 130)
    moved = rotated(keys[:60], turned, new + 20_000 - 70, new).bfloat16()
    write(expected, moved, values[:60], new)
    # Products may be rounded in another order, by one step of bfloat16.
    torch.testing.assert_close(pages, expected, rtol=2**-7, atol=1e-5)
    assert (pages != expected).float().mean() < 0.01


class OnCpus(StandInModel):
    """A layer of vLLM's CPU backend, with its own kernel for these instructions."""

    block_size, block_sizes, dtype = 32, (32,), torch.bfloat16

    def __init__(self, instructions: str) -> None:
        super().__init__(n_layers=1)
        (layer,) = self._layers.values()
        layer.kv_cache, layer.head_size = pages_of(2, 32, 32), 32
        self._instructions = instructions

    def page_size_of(self, name):
        return self.block_size

    def write(self, index, keys, values, slots):
        write(self.layer(self.layer_names[index]).kv_cache, keys, values, slots, instructions=self._instructions)


@pytest.mark.parametrize(
    "instructions, format", [pytest.param("amx", "packed_tiles", marks=needs_tiles), ("vec", "packed_transposed")]
)
def test_what_the_layer_writes_shows_the_format_of_its_pages(instructions, format):
    model = OnCpus(instructions)
    (group,) = layer_groups.layer_groups(model, 64)
    assert group.format == format
    _check_layout(model, layer_groups.pages_of(model, [group]))
