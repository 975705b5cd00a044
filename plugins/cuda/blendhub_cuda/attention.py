"""Attention for chosen tokens on GPUs: cuts them in tiles, and launches one kernel for each layer; for a layer of a
probe two, or three where what it attends to is added up."""

from collections.abc import Sequence
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from triton import next_power_of_2

from blendhub.contracts import AttentionRules, ChosenAttention, ChosenTokens
from blendhub.core.errors import Unsupported
from blendhub.core.layout import KVLayout
from blendhub.devices import Pages
from blendhub_cuda.attention_kernel import TILE_WORDS, add_received, attend_chosen, merge_parts

ROWS, KEYS = 128, 64
"""The rows of a tile, each a token's head, and the keys that a program multiplies with them at a time."""
WIDE, ROWS_IF_WIDE, KEYS_OF_FLOAT32 = 256, 64, 16
"""Heads with more items than the first number leave room for fewer rows in a GPU's shared memory; and these and heads
with as many for fewer keys, if items have 32 bits."""
MAX_PARTS, PART_KEYS = 16, 1024
"""Few tokens fill few programs. So keys that are readable in part are cut in so many parts at most, each with so many
keys at least."""
MIN_TILE = 16
"""The least rows and columns of a product in Triton."""
OF_MERGING = "VALUE_WIDTH", "VALUE_COLUMNS"
OF_ADDING = (
    *("TOKENS", "GROUP", "HEADS", "ROWS", "KEYS", "BLOCK_SIZE", "WIDTH", "MAIN", "REST", "DTYPE"),
    *("WINDOW", "CHUNK", "SOFT_CAP", "num_warps"),
)
"""The constants of a layer that the other kernels take."""
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
            _layer(planes.keys, planes.values, one, layout.dtype, dtype)
            for planes, one in zip(pages.layers, rules, strict=True)
        ]
        # Without tokens nothing runs, but kernels are compiled.
        for tokens in (NOTHING, NOTHING._replace(readable=np.zeros((1, 1), np.bool_))):
            self.begin(tokens)
            for number, layer in enumerate(self._layers):
                n_heads, width, value_width = layer.keys.shape[1], layer.keys.shape[3], layer.constants["VALUE_WIDTH"]
                queries = torch.empty(0, layer.rules.heads, width, dtype=dtype, device=self._place)
                output = queries.new_empty(*queries.shape[:2], value_width)
                if tokens.readable is None:
                    self.attend(number, queries, output)
                else:
                    keys, received = queries[:, :n_heads], torch.zeros(1, 1, device=self._place)
                    self.probe(number, queries, keys, keys[..., :value_width], output, received)

    def begin(self, tokens: ChosenTokens) -> None:
        order = np.lexsort((tokens.positions, tokens.prompts))
        prompts, positions = tokens.prompts[order], tokens.positions[order]
        shapes = {layer.shape for layer in self._layers}
        self._readable, self._n_parts, self._part_keys = None, 1, 0
        n_keys = None
        if tokens.readable is not None:
            n_keys = tokens.readable.shape[1]
            self._readable = self._sent(tokens.readable, np.int8)
            self._n_parts = max(1, min(MAX_PARTS, n_keys // PART_KEYS))
            self._part_keys = -(-n_keys // self._n_parts // KEYS) * KEYS
        tiles = {shape: tiles_of(prompts, positions, shape.tokens, n_keys) for shape in shapes}
        self._tiles = {shape: self._sent(of_shape) for shape, of_shape in tiles.items()}
        starts = np.searchsorted(prompts, np.arange(len(tokens.blocks) + 1))
        sent = map(self._sent, (order, tokens.positions, tokens.blocks, starts))
        self._order, self._positions, self._blocks, self._starts = sent

    def attend(self, layer: int, queries: torch.Tensor, output: torch.Tensor) -> None:
        self._launch(layer, queries, output[None])

    def probe(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        output: torch.Tensor,
        received: torch.Tensor | None = None,
    ) -> None:
        taken = output.new_empty((self._n_parts + 1, *output.shape), dtype=torch.float32)
        sums = taken.new_empty((self._n_parts + 2, *output.shape[:2]))
        self._launch(layer, queries, taken, sums, (keys, values))
        n_parts, log_sums, constants = len(taken), sums[-1], self._layers[layer].constants
        merge_parts[output.shape[:2]](
            output, *output.stride()[:2], log_sums, taken, taken.stride(0), sums, sums.stride(0), n_parts,
            **{name: constants[name] for name in OF_MERGING},
        )  # fmt: skip
        if received is not None:
            self._add_received(layer, queries, log_sums, received)

    def _launch(
        self,
        layer: int,
        queries: torch.Tensor,
        taken: torch.Tensor,
        sums: torch.Tensor | None = None,
        own: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        """``taken`` has a part on its first axis for each part of the keys; of a probe, the last is ``own``."""
        keys, values, rules, shape, constants = self._layers[layer]
        tiles, n_heads, readable = self._tiles[shape], keys.shape[1], self._readable
        grid = (n_heads * -(-rules.heads // n_heads // shape.heads), len(tiles), len(taken))
        beside: list[Any] = [None] * 7
        if own:
            beside = [*chain.from_iterable((part, *part.stride()[:2]) for part in own), self._starts]
        attend_chosen[grid](
            taken, taken.stride(0) if own else 0, *taken.stride()[1:3], sums, 0 if sums is None else sums.stride(0),
            queries, *queries.stride()[:2],
            keys, *_strides(keys), values, *_strides(values),
            self._order, self._positions, tiles, self._blocks, self._blocks.stride(0),
            readable, 0 if readable is None else readable.stride(0), self._part_keys, rules.sinks, *beside,
            rules.scale, rules.key_scale, rules.value_scale, PARTLY=own is not None, **constants,
        )  # fmt: skip

    def _add_received(self, layer: int, queries: torch.Tensor, log_sums: torch.Tensor, received: torch.Tensor) -> None:
        keys, _, rules, _, constants = self._layers[layer]
        assert self._readable is not None
        n_prompts, n_keys = self._readable.shape
        add_received[-(-n_keys // constants["KEYS"]), n_prompts](
            received, received.stride(0), n_keys, log_sums, queries, *queries.stride()[:2], keys, *_strides(keys),
            self._order, self._positions, self._starts, self._blocks, self._blocks.stride(0),
            self._readable, self._readable.stride(0), rules.scale, rules.key_scale,
            # Beside wide keys, shared memory has no room for queries that are fetched ahead.
            N_HEADS=keys.shape[1], num_stages=1 if constants["MAIN"] > WIDE else constants["num_stages"],
            **{name: constants[name] for name in OF_ADDING},
        )  # fmt: skip

    def _sent(self, numbers: npt.NDArray[Any], dtype: npt.DTypeLike = np.int32) -> torch.Tensor:
        """The numbers as integers on the GPU, without waiting for it."""
        tensor = torch.from_numpy(numbers.astype(dtype))
        if self._place.type != "cpu":
            tensor = tensor.pin_memory()
        return tensor.to(self._place, non_blocking=True)


def tiles_of(
    prompts: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], tokens: int, n_keys: int | None = None
) -> npt.NDArray[np.int32]:
    """Cut tokens in tiles, each of one prompt. The tokens of a prompt stand together, in ascending positions.

    Only the last tile of each prompt may have room to spare, however short the spans of chosen tokens are. Tiles with
    the most keys come first: a GPU that ends with them would wait for the last ones. ``n_keys``: no prompt has more.
    """
    edges = [0, *(np.flatnonzero(np.diff(prompts)) + 1).tolist(), len(prompts)]
    tiles = [np.zeros((0, TILE_WORDS.value), np.int64)]
    for start, end in pairwise(edges):
        first = np.arange(start, end, tokens)
        last = np.minimum(first + tokens, end) - 1
        tiles.append(np.stack([prompts[first], first, last + 1 - first, positions[first], positions[last]], 1))
    joined = np.concatenate(tiles).astype(np.int32)
    if n_keys is not None:
        joined[:, -1] = np.minimum(joined[:, -1], n_keys - 1)
    return joined[np.argsort(-joined[:, -1], kind="stable")]


def tile_shape(group: int, width: int) -> TileShape:
    """``group``: the query heads that share a head of keys, which has ``width`` items."""
    most = ROWS_IF_WIDE if width > WIDE else ROWS
    heads = min(group, most)
    tokens = most // heads
    return TileShape(tokens, heads, max(MIN_TILE, next_power_of_2(tokens * heads)))


def _layer(
    keys: torch.Tensor, values: torch.Tensor, rules: AttentionRules, dtype: str, multiplied: torch.dtype
) -> Layer:
    """``multiplied``: the dtype of queries, to which keys and values are converted."""
    _, n_heads, block_size, width = keys.shape
    main, rest = _split(width)
    if rules.latent not in (0, main):
        raise Unsupported(f"the attention of device 'cuda' has no kernel for values of {rules.latent} items of {width}")
    value_width = rules.latent or values.shape[-1]
    shape = tile_shape(rules.heads // n_heads, width)
    is_float8, is_half = dtype.startswith("float8"), dtype in ("float16", "bfloat16") and multiplied.itemsize == 2
    if is_float8:
        keys, values = keys.view(torch.int8), values.view(torch.int8)
    constants = {
        "TOKENS": shape.tokens,
        "GROUP": rules.heads // n_heads,
        "HEADS": shape.heads,
        "ROWS": shape.rows,
        "KEYS": KEYS_OF_FLOAT32 if width >= WIDE and multiplied.itemsize > 2 else KEYS,
        "BLOCK_SIZE": block_size,
        "WIDTH": width,
        "MAIN": main,
        "REST": rest,
        "VALUE_WIDTH": value_width,
        "VALUE_COLUMNS": max(MIN_TILE, next_power_of_2(value_width)),
        "LATENT": rules.latent > 0,
        "DTYPE": dtype if is_float8 else "",
        "WINDOW": rules.window or 0,
        "CHUNK": rules.chunk or 0,
        "SOFT_CAP": rules.soft_cap,
        "SINKS": rules.sinks is not None,
        "num_warps": 8 if shape.rows * main >= ROWS * 64 else 4,
        # Measured on an H100. With three stages the table's entries are fetched ahead; wide heads leave no room for it.
        # With half of a multiprocessor's registers, two programs take turns at products and powers.
        "num_stages": 3 if main <= ROWS else 2,
        **({"maxnreg": 128} if main == ROWS and is_half and torch.version.hip is None else {}),
    }
    return Layer(keys, keys if rules.latent else values, rules, shape, constants)


def _strides(planes: torch.Tensor) -> tuple[int, int, int]:
    """From block to block, token to token, and head to head."""
    return planes.stride(0), planes.stride(2), planes.stride(1)


def _split(width: int) -> tuple[int, int]:
    """The items of a key as two powers of 2, of which the second may be 0: so 576 items take no room of 1,024."""
    main = 1 << (width.bit_length() - 1)
    rest = width - main
    if main >= MIN_TILE and (rest == 0 or (rest >= MIN_TILE and rest & (rest - 1) == 0)):
        return main, rest
    return max(MIN_TILE, next_power_of_2(width)), 0
