"""Pages of CPUs with AMX, which vLLM uses for bfloat16: what its own kernel writes is found, saved and loaded.

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

from blendhub.contracts import PagedLayer, Segment
from blendhub.core.layout import KVLayout
from blendhub.core.spans import Span
from blendhub.vllm.model import layer_groups
from blendhub.vllm.model.checks.model_check import _check_layout
from tests.vllm.stand_in_model import StandInModel

if not hasattr(ops, "cpu_attn_reshape_and_cache"):
    pytest.skip("this vLLM was not built for CPUs", allow_module_level=True)

N_BLOCKS = 5


def write(pages, keys, values, slots, instructions="amx"):
    """Writes as vLLM's layer does."""
    n, heads, block, _ = pages.shape
    key_pages, value_pages = pages.view(n, heads, 2 * block, -1).chunk(2, dim=2)
    scales = {"k_scale": 1.0, "v_scale": 1.0}
    ops.cpu_attn_reshape_and_cache(
        keys, values, key_pages, value_pages, slots, instructions, **scales, kv_cache_dtype="auto"
    )


def pages_of(heads, block, width):
    return torch.zeros(N_BLOCKS, heads, block, 2 * width, dtype=torch.bfloat16)


def layer_of(pages):
    n, heads, block, both = pages.shape
    return PagedLayer("layer", "packed_tiles", (pages.view(n, heads, block * both),))


def numbers(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def layout(heads, width):
    return KVLayout(layers=1, kv_heads=heads, key_dim=width, value_dim=width, dtype="bfloat16", chunk_tokens=64)


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
