"""Attention of chosen tokens by the CUDA device, beside that of a full prefill by torch. It needs a GPU.

The layers are those of ``benchmarks.device``, and 15% of a prompt's tokens are chosen, spread evenly. All rows are
figures without a bar.
"""

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch

from benchmarks.device import HEADS, LAYERS, WIDTH, seconds_on
from benchmarks.report import Row, finish, parser, row
from benchmarks.timing import in_turn
from blendhub.contracts import AttentionRules, ChosenTokens
from blendhub.core.layout import KVLayout
from blendhub.devices import Pages, Planes

SHAPES = ((4, 8), (4, 32), (4, 64), (8, 32))
"""The heads of queries for each head of keys, and the prompt's length in units of 1,024 tokens."""
LENGTHS = (1, 4, 8, 32, 128)
SHARE, BLOCK, DIFFERENT = 0.15, 16, 4
"""``DIFFERENT``: so many layers have pages of their own, and take turns, so that caches do not keep them."""
LAYOUT = KVLayout(layers=1, kv_heads=HEADS, key_dim=WIDTH, value_dim=WIDTH, dtype="bfloat16", chunk_tokens=BLOCK)


def main() -> None:
    options = parser(__doc__ or "").parse_args()
    rows = [row for shape in SHAPES for row in rows_of_shape(*shape, repeats=3 if options.quick else 9)]
    finish("attention", rows, "torch triton blendhub-cuda", options.json)


def rows_of_shape(group: int, kilo: int, repeats: int) -> Iterator[Row]:
    timed = measured(group, 1024 * kilo, repeats) if torch.cuda.is_available() else {}
    full, shape = timed.get(0, []), f"gqa{group}_{kilo}k"
    what = f"attention of a full prefill by torch, {LAYERS} layers"
    yield row(f"full_{shape}", what, "ms", [1000 * seconds for seconds in full], better="lower")
    for length in LENGTHS:
        share = len(chosen(1024 * kilo, length)) / (1024 * kilo)
        values = [ours / share / theirs for ours, theirs in zip(timed.get(length, []), full, strict=True)]
        what = f"attention of a chosen token, to that of a token in a full prefill: spans of {length} tokens"
        yield row(f"own_{shape}_spans_of_{length}", what, "x", values, better="lower")


def measured(group: int, n: int, repeats: int) -> dict[int, list[float]]:
    """The seconds for spans of each length; 0: for a full prefill."""
    from blendhub_cuda.attention import CudaAttention

    place, rules = torch.device("cuda"), AttentionRules(HEADS * group, WIDTH**-0.5)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=place)

    pages = [numbers(n // BLOCK, HEADS, BLOCK, 2 * WIDTH) for _ in range(DIFFERENT)]
    planes = tuple(Planes(one[..., :WIDTH], one[..., WIDTH:], None) for one in pages)
    attention = CudaAttention(Pages(planes, n // BLOCK, place), LAYOUT, [rules] * DIFFERENT, torch.bfloat16)
    queries, (keys, values) = numbers(1, HEADS * group, n, WIDTH), (numbers(1, HEADS, n, WIDTH) for _ in range(2))
    blocks = np.arange(n // BLOCK, dtype=np.int32)[None]

    def full() -> None:
        for _ in range(LAYERS):
            torch.nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)

    def own(positions: "np.ndarray[tuple[int], np.dtype[np.int64]]", asked: torch.Tensor, taken: torch.Tensor) -> None:
        attention.begin(ChosenTokens(positions, np.zeros_like(positions), blocks))
        for layer in range(LAYERS):
            attention.attend(layer % DIFFERENT, asked, taken)

    jobs = {"0": full}
    for length in LENGTHS:
        positions = chosen(n, length)
        asked = numbers(len(positions), HEADS * group, WIDTH)
        jobs[str(length)] = partial(own, positions, asked, torch.empty_like(asked))
    return {int(name): seconds for name, seconds in in_turn(jobs, repeats, partial(seconds_on, "cuda")).items()}


def chosen(n: int, length: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    starts = np.linspace(0, n - length, int(SHARE * n / length), dtype=np.int64)
    return (starts[:, None] + np.arange(length)).ravel()


if __name__ == "__main__":
    main()
