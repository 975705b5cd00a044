"""Attention for chosen tokens, compared with a softmax over each query's keys by itself."""

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from blendhub_cuda.attention import AttendedPages, attend, tiles_of

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
pytestmark = pytest.mark.slow

TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}


class Case:
    """Prompts whose chosen tokens are asked, with random keys and values in pages of any order."""

    def __init__(
        self,
        chosen: list[list[int]],
        *,
        heads: int = 4,
        key_heads: int = 2,
        width: int = 64,
        value_width: int | None = None,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        cache: torch.dtype | None = None,
        latent: bool = False,
        packed: bool = False,
        seed: int = 0,
    ) -> None:
        random = torch.Generator().manual_seed(seed)
        longest = max(max(positions) for positions in chosen) + 1
        n_blocks = -(-longest // block_size)
        blocks = torch.randperm(len(chosen) * n_blocks + 3, generator=random)[: len(chosen) * n_blocks]
        self.blocks = blocks.view(len(chosen), n_blocks).to(torch.int32)
        value_width = width if value_width is None else value_width
        # Keys and values of a head in one row, or each in its own tensor: kernels must respect any strides.
        shape = (len(chosen) * n_blocks + 3, key_heads, block_size)
        both = torch.randn(*shape, width + value_width, generator=random) / 2
        both = both.to(cache or dtype).transpose(1, 2)
        keys, values = both[..., :width], both[..., width:]
        if not packed:
            keys, values = keys.contiguous(), values.contiguous()
        self.pages = AttendedPages(keys, None if latent else values)
        if cache is not None:
            self.pages = self.pages._replace(key_scale=0.5, value_scale=2.0)
        self.positions = torch.tensor([at for positions in chosen for at in positions], dtype=torch.int32)
        self.prompts = np.repeat(np.arange(len(chosen)), [len(positions) for positions in chosen])
        self.queries = torch.randn(len(self.positions), heads, width, generator=random).to(dtype)
        self.block_size, self.latent = block_size, latent

    def found(self, **how) -> torch.Tensor:
        group = self.queries.shape[1] // self.pages.keys.shape[2]
        tiles = tiles_of(self.positions.numpy().astype(np.int64), self.prompts, group, self.queries.shape[-1], DEVICE)
        pages = self.pages._replace(
            keys=self.pages.keys.to(DEVICE), values=None if self.latent else self.pages.values.to(DEVICE)
        )
        given = self.queries.to(DEVICE), self.positions.to(DEVICE), pages, self.blocks.to(DEVICE), tiles
        return attend(*given, scale=how.pop("scale", 0.2), **how).float().cpu()

    def expected(self, *, scale=0.2, window=0, soft_cap=0.0, sinks=None) -> torch.Tensor:
        answers = []
        for query, at, prompt in zip(self.queries.double(), self.positions.tolist(), self.prompts, strict=True):
            seen = torch.arange(max(0, at - window + 1) if window else 0, at + 1)
            block, place = self.blocks[prompt][seen // self.block_size].long(), seen % self.block_size
            keys = self.pages.keys[block, place].double() * self.pages.key_scale
            width = 1 << (keys.shape[-1].bit_length() - 1)
            values = keys[..., :width] if self.latent else self.pages.values[block, place].double()
            values = values * self.pages.value_scale
            group = len(query) // keys.shape[1]
            keys, values = (part.repeat_interleave(group, 1) for part in (keys, values))
            scores = torch.einsum("hd,khd->hk", query, keys) * scale
            if soft_cap:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            if sinks is not None:
                scores = torch.cat([scores, sinks.double()[:, None]], 1)
            shares = scores.softmax(1)[:, : len(seen)]
            answers.append(torch.einsum("hk,khd->hd", shares, values))
        return torch.stack(answers).float()

    def check(self, **how) -> None:
        found, expected = self.found(**how), self.expected(**how)
        assert (found - expected).abs().max() < TOLERANCE[self.queries.dtype]


def spread_out(n: int, end: int, seed: int = 1) -> list[int]:
    return sorted(np.random.default_rng(seed).choice(end, n, replace=False).tolist())


SPANS = {
    "single tokens": [spread_out(70, 200)],
    "spans of four": [[at for start in range(3, 190, 13) for at in range(start, start + 4)]],
    "one span of all": [list(range(150))],
    "the first token and the last": [[0, 199]],
    "several prompts": [spread_out(5, 180), [0], spread_out(40, 60, 2), list(range(100, 120))],
}


@pytest.mark.parametrize("chosen", SPANS.values(), ids=SPANS)
def test_every_query_sees_the_keys_of_its_prompt_up_to_its_position(chosen):
    Case(chosen).check()


@pytest.mark.parametrize("group, width", product([1, 3, 4, 16], [64, 96, 128]))
def test_heads_share_keys(group, width):
    Case([spread_out(20, 130)], heads=2 * group, width=width).check()


@pytest.mark.parametrize("block_size", [16, 32, 128])
@pytest.mark.parametrize("packed", [False, True], ids=["apart", "packed"])
def test_any_pages(block_size, packed):
    Case([spread_out(20, 150), spread_out(9, 90)], block_size=block_size, packed=packed, value_width=32).check()


# Triton's interpreter multiplies the bits of bfloat16 as integers.
@pytest.mark.parametrize("dtype", [torch.float16, *([torch.bfloat16] if HAS_GPU else [])])
def test_half_precision(dtype):
    Case([spread_out(40, 150)], dtype=dtype).check()


@pytest.mark.parametrize("cache", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_keys_and_values_of_8_bits_have_scales(cache):
    Case([spread_out(20, 100)], cache=cache).check()


HOW = {
    "a window": {"window": 37},
    "a window of one token": {"window": 1},
    "a soft cap": {"soft_cap": 2.0, "scale": 1.0},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 9.0])},
    "all of them": {"window": 20, "soft_cap": 5.0, "sinks": torch.tensor([0.5, -1.0, 2.0, 9.0])},
}


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_ways_to_attend(how):
    if "sinks" in how:
        how = how | {"sinks": how["sinks"].to(DEVICE)}
    case = Case([spread_out(50, 200), spread_out(7, 70)])
    found = case.found(**how)
    how = {name: value.cpu() if name == "sinks" else value for name, value in how.items()}
    assert (found - case.expected(**how)).abs().max() < 1e-4


@pytest.mark.parametrize("heads", [16, 130])
def test_a_latent_is_key_and_value_of_all_heads(heads):
    """As with MLA: 512 items and 64 rotated ones; 130 heads are more than a tile has rows."""
    Case([spread_out(3, 70)], heads=heads, key_heads=1, width=576, value_width=0, latent=True).check(scale=0.04)


@pytest.mark.parametrize("length", [1, 4])
def test_tiles_are_full_however_short_spans_are(length):
    """The useful rows of all tiles, for 15% of 32,768 tokens and four query heads for each head of keys."""
    starts = np.arange(0, 32_768, length * 20 // 3)[:, None]
    positions = (starts + np.arange(length)).ravel()
    tiles = tiles_of(positions, np.zeros(len(positions), np.int64), 4, 128, torch.device("cpu"))
    assert int(tiles.table[:, 2].sum()) == len(positions)
    assert len(positions) * 4 / (len(tiles.table) * tiles.rows) >= 0.9


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
