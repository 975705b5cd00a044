"""Attention of chosen tokens by the CUDA device, beside that of a full prefill by torch. It needs a GPU.

The layers are those of ``benchmarks.device``. 30% of a prompt's tokens are chosen: single ones anywhere, as the default
selector picks them, or spans, as holes are. All rows are figures without a bar.
"""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.device import HEADS, LAYERS, WIDTH, seconds_on
from benchmarks.report import Row, finish, parser, row
from benchmarks.timing import in_turn, ratios
from blendhub.contracts import AttentionRules, ChosenTokens
from blendhub.core.layout import KVLayout
from blendhub.devices import Pages, Planes

SHAPES = ((4, 8), (4, 32), (4, 64), (8, 32))
"""The heads of queries for each head of keys, and the prompt's length in units of 1,024 tokens."""
SPANS = {"picks": 1, "holes": 128}
SHARE, BLOCK, DIFFERENT = 0.3, 16, 4
"""``DIFFERENT``: so many layers have pages of their own, and take turns, so that caches do not keep them."""
LAYOUT = KVLayout(layers=1, kv_heads=HEADS, key_dim=WIDTH, value_dim=WIDTH, dtype="bfloat16", chunk_tokens=BLOCK)


def main() -> None:
    options = parser(__doc__ or "").parse_args()
    rows = [row for shape in SHAPES for row in rows_of_shape(*shape, repeats=3 if options.quick else 9)]
    finish("attention", rows, "torch triton blendhub-cuda", options.json)


def rows_of_shape(group: int, kilo: int, repeats: int) -> Iterator[Row]:
    n, shape = 1024 * kilo, f"gqa{group}_{kilo}k"
    timed = in_turn(jobs(group, n), repeats, partial(seconds_on, "cuda")) if torch.cuda.is_available() else {}
    full = timed.get("full", [])
    what = f"attention of a full prefill by torch, {LAYERS} layers"
    yield row(f"full_{shape}", what, "ms", [1000 * seconds for seconds in full], better="lower")
    for kind, length in SPANS.items():
        share = len(chosen(n, length)) / n
        what = "attention of a chosen token by the device, to that of a token in a full prefill: "
        values = [ratio / share for ratio in ratios(timed.get(kind, []), full)]
        yield row(f"own_{shape}_{kind}", f"{what}{kind}, spans of {length} tokens", "x", values, better="lower")


def jobs(group: int, n: int) -> dict[str, Callable[[], None]]:
    """Attention in all layers: of a full prefill, and of chosen tokens."""
    from blendhub_cuda.attention import CudaAttention

    place, rules = torch.device("cuda"), AttentionRules(HEADS * group, WIDTH**-0.5)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=place)

    pages = [numbers(n // BLOCK, HEADS, BLOCK, 2 * WIDTH) for _ in range(DIFFERENT)]
    planes = tuple(Planes(layer[..., :WIDTH], layer[..., WIDTH:], None) for layer in pages)
    attention = CudaAttention(Pages(planes, n // BLOCK, place), LAYOUT, [rules] * DIFFERENT, torch.bfloat16)
    queries, (keys, values) = numbers(1, HEADS * group, n, WIDTH), (numbers(1, HEADS, n, WIDTH) for _ in range(2))
    blocks = np.arange(n // BLOCK, dtype=np.int32)[None]

    def full() -> None:
        for _ in range(LAYERS):
            torch.nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)

    def own(positions: npt.NDArray[np.int64], asked: torch.Tensor, taken: torch.Tensor) -> None:
        attention.begin(ChosenTokens(positions, np.zeros_like(positions), blocks))
        for layer in range(LAYERS):
            attention.attend(layer % DIFFERENT, asked, taken)

    ways: dict[str, Callable[[], None]] = {"full": full}
    for kind, length in SPANS.items():
        positions = chosen(n, length)
        asked = numbers(len(positions), HEADS * group, WIDTH)
        ways[kind] = partial(own, positions, asked, torch.empty_like(asked))
    return ways


def chosen(n: int, length: int) -> npt.NDArray[np.int64]:
    """Spans of one length, anywhere in the prompt, and not two at one place."""
    places = np.random.default_rng(n).choice(n // length, int(SHARE * n / length), replace=False)
    return (np.sort(places)[:, None] * length + np.arange(length)).ravel()


if __name__ == "__main__":
    main()
