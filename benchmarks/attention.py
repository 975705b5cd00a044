"""Attention of chosen tokens by the CUDA device, beside that of a full prefill by torch. It needs a GPU.

The layers are those of ``benchmarks.device``. 30% of a prompt's tokens are chosen: single ones anywhere, as the default
selector picks them, or spans, as holes are. Where vLLM is installed, its FlashAttention answers the same tokens, each
span as a request. All rows are figures without a bar.
"""

from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.device import HEADS, LAYERS, WIDTH, seconds_on
from benchmarks.report import Row, finish, parser, row
from benchmarks.timing import in_turn
from blendhub.contracts import AttentionRules, ChosenTokens
from blendhub.core.layout import KVLayout
from blendhub.devices import Pages, Planes

SHAPES = ((4, 8), (4, 32), (4, 64), (8, 32))
"""The heads of queries for each head of keys, and the prompt's length in units of 1,024 tokens."""
SPANS = {"picks": 1, "holes": 128}
WAYS = {
    "own": "attention of a chosen token by the device",
    "flash": "the same by vLLM's FlashAttention",
}
SHARE, BLOCK, DIFFERENT = 0.3, 16, 4
"""``DIFFERENT``: so many layers have pages of their own, and take turns, so that caches do not keep them."""
LAYOUT = KVLayout(layers=1, kv_heads=HEADS, key_dim=WIDTH, value_dim=WIDTH, dtype="bfloat16", chunk_tokens=BLOCK)
FLASH = "vllm.vllm_flash_attn"


def main() -> None:
    options = parser(__doc__ or "").parse_args()
    rows = [row for shape in SHAPES for row in rows_of_shape(*shape, repeats=3 if options.quick else 9)]
    finish("attention", rows, "torch triton blendhub-cuda vllm", options.json)


def rows_of_shape(group: int, kilo: int, repeats: int) -> Iterator[Row]:
    n, shape = 1024 * kilo, f"gqa{group}_{kilo}k"
    timed = in_turn(jobs(group, n), repeats, partial(seconds_on, "cuda")) if torch.cuda.is_available() else {}
    full = timed.get("full", [])
    what = f"attention of a full prefill by torch, {LAYERS} layers"
    yield row(f"full_{shape}", what, "ms", [1000 * seconds for seconds in full], better="lower")
    for way, about in WAYS.items():
        for kind, length in SPANS.items():
            share = len(chosen(n, length)) / n
            pairs = zip(timed.get(f"{way} {kind}", []), full, strict=False)
            what = f"{about}, to that of a token in a full prefill: {kind}, spans of {length} tokens"
            values = [seconds / share / theirs for seconds, theirs in pairs]
            yield row(f"{way}_{shape}_{kind}", what, "x", values, better="lower")


def jobs(group: int, n: int) -> dict[str, Callable[[], None]]:
    """Attention in all layers: of a full prefill, and of chosen tokens in each way that there is here."""
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

    def flash(ends: torch.Tensor, table: torch.Tensor, asked: torch.Tensor, taken: torch.Tensor) -> None:
        from vllm.v1.attention.backends.fa_utils import get_flash_attn_version
        from vllm.vllm_flash_attn import flash_attn_varlen_func

        length = len(asked) // len(ends)
        for layer in range(LAYERS):
            kv = planes[layer % DIFFERENT]
            flash_attn_varlen_func(
                asked, kv.keys.transpose(1, 2), kv.values.transpose(1, 2), out=taken, causal=True, block_table=table,
                max_seqlen_q=length, cu_seqlens_q=torch.arange(0, len(asked) + 1, length, dtype=torch.int32).to(place),
                max_seqlen_k=n, seqused_k=ends, softmax_scale=rules.scale, fa_version=get_flash_attn_version() or 2,
            )  # fmt: skip

    ways: dict[str, Callable[[], None]] = {"full": full}
    for kind, length in SPANS.items():
        positions = chosen(n, length)
        asked = numbers(len(positions), HEADS * group, WIDTH)
        taken = torch.empty_like(asked)
        ways[f"own {kind}"] = partial(own, positions, asked, taken)
        if find_spec(FLASH) and find_spec(f"{FLASH}._vllm_fa3_C"):
            ends = torch.from_numpy(positions[length - 1 :: length] + 1).int().to(place)
            table = torch.from_numpy(blocks).to(place).expand(len(ends), -1)
            ways[f"flash {kind}"] = partial(flash, ends, table, asked, taken)
    return ways


def chosen(n: int, length: int) -> npt.NDArray[np.int64]:
    """Spans of one length, anywhere in the prompt, and not two at one place."""
    places = np.random.default_rng(n).choice(n // length, int(SHARE * n / length), replace=False)
    return (np.sort(places)[:, None] * length + np.arange(length)).ravel()


if __name__ == "__main__":
    main()
