"""Attention for chosen tokens on GPUs: cuts them in tiles, and launches the kernel once for each layer."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from triton import next_power_of_2

from blendhub.contracts import AttentionRules, ChosenAttention, ChosenTokens
from blendhub.core.errors import Unsupported
from blendhub.core.layout import KVLayout
from blendhub.devices import Pages
from blendhub_cuda.attention_kernel import TILE_WORDS, attend_chosen

ROWS, KEYS = 128, 64
"""The rows of a tile, each a token's head, and the keys that a program multiplies with them at a time."""
WIDE, ROWS_IF_WIDE, KEYS_IF_WIDE = 256, 64, 16
"""Heads with more items than the first number leave room for fewer in a GPU's shared memory."""
LEAST = 16
"""The least rows and columns of a product in Triton."""
NOTHING = ChosenTokens(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros((1, 1), np.int32))


class TileShape(NamedTuple):
    tokens: int
    """The most tokens of a tile."""
    heads: int
    """The query heads of a token that one program answers."""
    rows: int


class Layer(NamedTuple):
    keys: torch.Tensor
    """``[blocks, heads, tokens of a block, items]`` with any strides but the last. 8-bit items are integers here."""
    values: torch.Tensor
    rules: AttentionRules
    shape: TileShape
    constants: dict[str, Any]


class CudaAttention(ChosenAttention):
    def __init__(self, pages: Pages, layout: KVLayout, rules: Sequence[AttentionRules], dtype: torch.dtype) -> None:
        if layout.dtype == "int8":
            raise Unsupported("the attention of device 'cuda' does not know the scales of int8")
        self._place = pages.place
        self._layers = [
            _layer(planes.keys, planes.values, one, layout.dtype)
            for planes, one in zip(pages.layers, rules, strict=True)
        ]
        # Without tokens nothing runs, but kernels are compiled.
        self.begin(NOTHING)
        for number, layer in enumerate(self._layers):
            width, value_width = layer.constants["WIDTH"], layer.constants["VALUE_WIDTH"]
            queries = torch.empty(0, layer.rules.heads, width, dtype=dtype, device=self._place)
            self.attend(number, queries, queries[..., :value_width].contiguous())

    def begin(self, tokens: ChosenTokens) -> None:
        order = np.lexsort((tokens.positions, tokens.prompts))
        prompts, positions = tokens.prompts[order], tokens.positions[order]
        shapes = {layer.shape for layer in self._layers}
        self._tiles = {shape: self._sent(tiles_of(prompts, positions, shape.tokens)) for shape in shapes}
        self._order, self._positions, self._blocks = map(self._sent, (order, tokens.positions, tokens.blocks))

    def attend(self, layer: int, queries: torch.Tensor, output: torch.Tensor) -> None:
        keys, values, rules, shape, constants = self._layers[layer]
        tiles, n_heads = self._tiles[shape], keys.shape[1]
        grid = (n_heads * -(-rules.heads // n_heads // shape.heads), len(tiles))
        attend_chosen[grid](
            output, *output.stride()[:2], queries, *queries.stride()[:2],
            keys, *_strides(keys), values, *_strides(values),
            self._order, self._positions, tiles, self._blocks, self._blocks.stride(0),
            self._positions if rules.sinks is None else rules.sinks,
            rules.scale, rules.key_scale, rules.value_scale, **constants,
        )  # fmt: skip

    def _sent(self, numbers: npt.NDArray[Any]) -> torch.Tensor:
        """The numbers as int32 on the GPU, without waiting for it."""
        tensor = torch.from_numpy(numbers.astype(np.int32))
        if self._place.type != "cpu":
            tensor = tensor.pin_memory()
        return tensor.to(self._place, non_blocking=True)


def tiles_of(prompts: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], tokens: int) -> npt.NDArray[np.int32]:
    """Cut tokens in tiles, each of one prompt. The tokens of a prompt stand together, in ascending positions.

    Only the last tile of each prompt may have room to spare, however short the spans of chosen tokens are. Tiles with
    the most keys come first: a GPU that ends with them would wait for the last ones.
    """
    edges = [0, *(np.flatnonzero(np.diff(prompts)) + 1).tolist(), len(prompts)]
    tiles = [np.zeros((0, TILE_WORDS.value), np.int64)]
    for start, end in pairwise(edges):
        first = np.arange(start, end, tokens)
        last = np.minimum(first + tokens, end) - 1
        tiles.append(np.stack([prompts[first], first, last + 1 - first, positions[first], positions[last]], 1))
    joined = np.concatenate(tiles).astype(np.int32)
    return joined[np.argsort(-joined[:, -1], kind="stable")]


def tile_shape(group: int, width: int) -> TileShape:
    """``group``: the query heads that share a head of keys, which has ``width`` items."""
    most = ROWS_IF_WIDE if width > WIDE else ROWS
    heads = min(group, most)
    tokens = most // heads
    return TileShape(tokens, heads, max(LEAST, next_power_of_2(tokens * heads)))


def _layer(keys: torch.Tensor, values: torch.Tensor, rules: AttentionRules, dtype: str) -> Layer:
    _, n_heads, block_size, width = keys.shape
    main, rest = _split(width)
    if rules.latent not in (0, main):
        raise Unsupported(f"the attention of device 'cuda' has no kernel for values of {rules.latent} items of {width}")
    value_width = rules.latent or values.shape[-1]
    shape = tile_shape(rules.heads // n_heads, width)
    is_float8 = dtype.startswith("float8")
    if is_float8:
        keys, values = keys.view(torch.int8), values.view(torch.int8)
    constants = {
        "TOKENS": shape.tokens,
        "GROUP": rules.heads // n_heads,
        "HEADS": shape.heads,
        "ROWS": shape.rows,
        "KEYS": KEYS_IF_WIDE if width > WIDE else KEYS,
        "BLOCK_SIZE": block_size,
        "WIDTH": width,
        "MAIN": main,
        "REST": rest,
        "VALUE_WIDTH": value_width,
        "VALUE_COLUMNS": max(LEAST, next_power_of_2(value_width)),
        "LATENT": rules.latent > 0,
        "DTYPE": dtype if is_float8 else "",
        "WINDOW": rules.window or 0,
        "CHUNK": rules.chunk or 0,
        "SOFT_CAP": rules.soft_cap,
        "SINKS": rules.sinks is not None,
        "num_warps": 8 if shape.rows * main >= ROWS * ROWS else 4,
        "num_stages": 2,
    }
    return Layer(keys, keys if rules.latent else values, rules, shape, constants)


def _strides(planes: torch.Tensor) -> tuple[int, int, int]:
    """From block to block, token to token, and head to head."""
    return planes.stride(0), planes.stride(2), planes.stride(1)


def _split(width: int) -> tuple[int, int]:
    """The items of a key as two powers of 2, of which the second may be 0: so 576 items take no room of 1,024."""
    main = 1 << (width.bit_length() - 1)
    rest = width - main
    if main >= LEAST and (rest == 0 or (rest >= LEAST and rest & (rest - 1) == 0)):
        return main, rest
    return max(LEAST, next_power_of_2(width)), 0
