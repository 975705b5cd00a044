"""The kernel of attention for chosen tokens, beyond what the conformance suite asks: shapes, and how full tiles are."""

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from blendhub_cuda import CudaOptions
from blendhub_cuda.attention import tile_shape, tiles_of
from blendhub_cuda.device import CudaDevice
from blendhub_cuda.runtime import CudaRuntime

from blendhub.contracts import AttentionRules
from blendhub.core.errors import Unsupported
from blendhub.core.layout import KVLayout
from blendhub.testing.devices.attending import LATENT, RULES, AttentionCase, spread_out
from blendhub.testing.devices.deferred import DeferredRuntime

N = 32_768
HAS_GPU = torch.cuda.is_available()
pytestmark = pytest.mark.slow


@pytest.fixture
def device():
    device = CudaDevice(CudaOptions(), CudaRuntime if HAS_GPU else lambda device: DeferredRuntime())
    yield device
    device.close()


def check(device, chosen, rules=RULES, **how):
    AttentionCase(device, "cuda" if HAS_GPU else "cpu", chosen, rules, **how).check()


def layout_of(width, value_width=64):
    return KVLayout(layers=1, kv_heads=2, key_dim=width, value_dim=value_width, dtype="float32", chunk_tokens=16)


@pytest.mark.parametrize("group, width", [*product([1, 3, 4, 16], [64, 96, 128])])
def test_heads_share_keys(group, width, device):
    check(device, [spread_out(20, 130)], AttentionRules(2 * group, 0.2), layout=layout_of(width))


def test_values_may_be_narrower_than_keys(device):
    check(device, [spread_out(20, 130)], layout=layout_of(64, 32), block_size=128)


# Triton's interpreter multiplies the bits of bfloat16 as integers.
@pytest.mark.parametrize("dtype", [torch.float16, *([torch.bfloat16] if HAS_GPU else [])])
def test_half_precision(dtype, device):
    name = "bfloat16" if dtype is torch.bfloat16 else "float16"
    layout = KVLayout(layers=1, kv_heads=2, key_dim=64, value_dim=64, dtype=name, chunk_tokens=16)
    check(device, [spread_out(40, 150)], layout=layout, dtype=dtype)


def test_a_latent_may_have_more_heads_than_a_tile_has_rows(device):
    check(device, [spread_out(3, 70)], AttentionRules(130, 0.04, latent=512), layout=LATENT, format="latent")


def test_a_latent_of_another_width_is_refused_with_a_sentence(device):
    with pytest.raises(Unsupported, match="no kernel for values of 448 items of 576"):
        check(device, [[0]], AttentionRules(16, 0.04, latent=448), layout=LATENT, format="latent")


def tiles_of_spans(length, shape):
    """The tiles for 15% of ``N`` tokens, chosen in spans of this length."""
    positions = (np.arange(0, N, length * 20 // 3)[:, None] + np.arange(length)).ravel()
    tiles = tiles_of(np.zeros(len(positions), np.int64), positions, shape.tokens)
    assert int(tiles[:, 2].sum()) == len(positions)
    return tiles


@pytest.mark.parametrize("length", [1, 4])
def test_tiles_are_full_however_short_spans_are(length):
    """The useful rows of all tiles, with four query heads for each head of keys."""
    shape = tile_shape(4, 128)
    tiles = tiles_of_spans(length, shape)
    assert int(tiles[:, 2].sum()) * 4 / (len(tiles) * shape.rows) >= 0.9


@pytest.mark.parametrize("heads, length", [*product([16, 128], [1, 4])])
def test_latents_are_read_less_than_the_keys_and_values_of_a_full_prefill(heads, length):
    """What the kernel's tiles read of pages, beside the least that a full prefill with MLA reads: it projects keys of
    192 items and values of 128 for each head, and FlashAttention reads them once for each 128 queries of a head."""
    shape = tile_shape(heads, 576)
    tiles = tiles_of_spans(length, shape)
    ours = 576 * int((tiles[:, 4] + 1).sum()) * -(-heads // shape.heads)
    assert ours / (heads * (192 + 128) * sum(range(128, N + 1, 128))) <= 0.6


@pytest.mark.long
def test_the_kernel_compiles_and_fits_into_the_memory_of_a_gpu(tmp_path):
    """In another process, because this one has the interpreter's kernel: it accepts code that the compiler refuses."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    script = Path(__file__).parent / "compiling_attention.py"
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for case, shared in json.loads(done.stdout).items():
        assert shared["sm_80"] <= 163 * 1024 and shared["sm_90"] <= 227 * 1024, case
