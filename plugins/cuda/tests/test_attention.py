"""The kernel of attention for chosen tokens, beyond what the conformance suite asks: shapes, and how full tiles are."""

from contextlib import closing

import numpy as np
import pytest
import torch
from blendhub_cuda import CudaOptions
from blendhub_cuda.attention import tile_shape, tiles_of
from blendhub_cuda.device import CudaDevice
from blendhub_cuda.runtime import CudaRuntime
from msgspec.structs import replace

from blendhub.contracts import AttentionRules
from blendhub.core.errors import Unsupported
from blendhub.testing.devices.attending import LATENT, LAYOUT, RULES, AttentionPages, check_attention, spread_out
from blendhub.testing.devices.deferred import DeferredRuntime

N = 32_768
HAS_GPU = torch.cuda.is_available()
pytestmark = pytest.mark.slow


def check(chosen, rules, pages, dtype=torch.float32):
    runtime, place = (CudaRuntime, "cuda") if HAS_GPU else (lambda place: DeferredRuntime(), "cpu")
    with closing(CudaDevice(CudaOptions(), runtime)) as device:
        check_attention(device, place, chosen, rules, pages, dtype)


@pytest.mark.parametrize("group, width, value_width", [(1, 64, 32), (3, 96, 96), (4, 128, 128), (16, 96, 64)])
def test_heads_share_keys_and_values_may_be_narrower(group, width, value_width):
    pages = AttentionPages(replace(LAYOUT, key_dim=width, value_dim=value_width), block_size=128)
    check([spread_out(20, 130)], AttentionRules(2 * group, 0.2), pages)


# Triton's interpreter multiplies the bits of bfloat16 as integers.
@pytest.mark.parametrize("dtype", ["float16", *(["bfloat16"] if HAS_GPU else [])])
def test_half_precision(dtype):
    check([spread_out(40, 150)], RULES, AttentionPages(replace(LAYOUT, dtype=dtype)), getattr(torch, dtype))


def test_a_latent_may_have_more_heads_than_a_tile_has_rows_and_is_refused_where_it_has_no_kernel():
    check([spread_out(3, 70)], AttentionRules(130, 0.04, latent=512), AttentionPages(LATENT, "latent"))
    with pytest.raises(Unsupported, match="no kernel for values of 448 items of 576"):
        check([[0]], AttentionRules(16, 0.04, latent=448), AttentionPages(LATENT, "latent"))


@pytest.mark.parametrize("length", [1, 4])
def test_tiles_of_short_spans_are_full_and_read_less_than_a_full_prefill(length):
    """Of 15% of ``N`` tokens, in spans of this length. The rows of tiles, with four query heads for each head of keys;
    and what tiles read of latents, beside the least that a full prefill with MLA reads: it projects keys of 192 items
    and values of 128 for each head, and FlashAttention reads them once for each 128 queries of a head."""
    positions = (np.arange(0, N, length * 20 // 3)[:, None] + np.arange(length)).ravel()
    prompts = np.zeros(len(positions), np.int64)
    shape = tile_shape(4, 128)
    tiles = tiles_of(prompts, positions, shape.tokens)
    assert int(tiles[:, 2].sum()) == len(positions)
    assert len(positions) * 4 / (len(tiles) * shape.rows) >= 0.9
    for heads in (16, 128):
        shape = tile_shape(heads, 576)
        tiles = tiles_of(prompts, positions, shape.tokens)
        ours = 576 * int((tiles[:, 4] + 1).sum()) * -(-heads // shape.heads)
        assert ours / (heads * (192 + 128) * sum(range(128, N + 1, 128))) <= 0.6
