"""Attention for chosen tokens on GPUs: cuts them in tiles, and launches the kernel once for each layer."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from blendhub_cuda.attention_kernel import TILE_WORDS, attend_chosen

ROWS, KEYS = 128, 64
"""The rows of a tile, each a token's head, and the keys that a program multiplies with them at a time."""
WIDE, ROWS_IF_WIDE, KEYS_IF_WIDE = 256, 64, 16
"""Heads with more items than the first number leave room for fewer in a GPU's shared memory."""
LEAST = 16
"""The least rows and columns of a product in Triton."""
FLOAT8 = {torch.float8_e4m3fn: "float8_e4m3", torch.float8_e5m2: "float8_e5m2"}


class AttendedPages(NamedTuple):
    """One layer's keys and values, each ``[blocks, tokens of a block, heads, items]`` with any strides but the last."""

    keys: torch.Tensor
    values: torch.Tensor | None
    """None: the values are the first items of the keys (MLA)."""
    key_scale: float = 1.0
    value_scale: float = 1.0


class Tiles(NamedTuple):
    """The tiles of a forward, which all layers with as many query heads for each head of keys share."""

    table: torch.Tensor
    tokens: int
    """The most tokens of a tile."""
    heads: int
    """The query heads of a token that one program answers."""
    rows: int


def tiles_of(
    positions: npt.NDArray[np.int64], prompts: npt.NDArray[np.int64], group: int, width: int, device: torch.device
) -> Tiles:
    """Cut the queries in tiles, each of one prompt. The queries of a prompt stand together, in ascending positions.

    ``group``: the query heads that share a head of keys, which has ``width`` items.
    Only the last tile of each prompt may have rows to spare, however short the spans of chosen tokens are.
    """
    most = ROWS_IF_WIDE if width > WIDE else ROWS
    heads = min(group, most)
    tokens = most // heads
    rows = max(LEAST, 1 << (tokens * heads - 1).bit_length())
    edges = np.flatnonzero(np.diff(prompts)) + 1
    tiles = []
    for start, end in zip([0, *edges.tolist()], [*edges.tolist(), len(prompts)], strict=True):
        for first in range(start, end, tokens):
            last = min(first + tokens, end) - 1
            tiles.append((prompts[start], first, last + 1 - first, positions[first], positions[last]))
    table = torch.from_numpy(np.array(tiles, np.int32).reshape(-1, TILE_WORDS.value))
    return Tiles(table.to(device, non_blocking=True), tokens, heads, rows)


def attend(
    queries: torch.Tensor,
    positions: torch.Tensor,
    pages: AttendedPages,
    blocks: torch.Tensor,
    tiles: Tiles,
    *,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """What each query takes from the keys of its prompt at its position and before: ``[queries, heads, items]``.

    ``queries`` are ``[queries, heads, items]``, ``positions`` int32 for each, ``blocks`` the blocks of each prompt as a
    row of int32. ``window``: a query sees so many keys, its own included; 0: all.
    """
    keys, values = pages.keys, pages.values if pages.values is not None else pages.keys
    n, n_heads, width = queries.shape
    _, block_size, n_keys, _ = keys.shape
    group = n_heads // n_keys
    latent = pages.values is None
    main, rest = _split(width)
    value_width = main if latent else values.shape[-1]
    out = queries.new_empty(n, n_heads, value_width)
    dtype = FLOAT8.get(keys.dtype, "")
    if dtype:
        keys, values = keys.view(torch.int8), values.view(torch.int8)
    grid = (len(tiles.table), n_keys * -(-group // tiles.heads))
    attend_chosen[grid](
        out, *out.stride()[:2], queries, *queries.stride()[:2],
        keys, *keys.stride()[:3], values, *values.stride()[:3],
        positions, tiles.table, blocks, blocks.stride(0), sinks if sinks is not None else positions,
        scale, pages.key_scale, pages.value_scale,
        TOKENS=tiles.tokens, GROUP=group, HEADS=tiles.heads, ROWS=tiles.rows,
        KEYS=KEYS_IF_WIDE if width > WIDE else KEYS,
        BLOCK_SIZE=block_size, WIDTH=width, MAIN=main, REST=rest,
        VALUE_WIDTH=value_width, VALUE_COLUMNS=main if latent else _ceil_power_of_2(value_width), LATENT=latent,
        DTYPE=dtype, WINDOW=window, SOFT_CAP=soft_cap, SINKS=sinks is not None,
        num_warps=8 if tiles.rows * main >= ROWS * ROWS else 4, num_stages=2,
    )  # fmt: skip
    return out


def _split(width: int) -> tuple[int, int]:
    """The items of a key as two powers of 2, of which the second may be 0: so 576 items take no room of 1,024."""
    main = 1 << (width.bit_length() - 1)
    rest = width - main
    if rest == 0 and main >= LEAST:
        return main, 0
    if rest >= LEAST and rest & (rest - 1) == 0:
        return main, rest
    return max(LEAST, _ceil_power_of_2(width)), 0


def _ceil_power_of_2(number: int) -> int:
    return 1 << max(number - 1, LEAST - 1).bit_length()
