"""Kernels that copy between rows of the arena, or of staging, and blocks of pages: all layers, keys and values at once.

They work on addresses, because one launch serves the tensors of all layers. Nothing is checked here: what reaches a
kernel was checked by :mod:`blendhub.devices`.

A program copies one tile, at most ``TOKENS`` tokens of one segment, of one layer's keys or values. The masks keep
it from everything else, so what is skipped is never touched: no program is started for it.
"""

import triton
import triton.language as tl

from blendhub_cuda import records
from blendhub_cuda.numbers import decode, encode

PLANE_WORDS = tl.constexpr(records.PLANE_WORDS)
ADDRESS, BLOCK_STRIDE = tl.constexpr(records.ADDRESS), tl.constexpr(records.BLOCK_STRIDE)
HEAD_STRIDE, TOKEN_STRIDE = tl.constexpr(records.HEAD_STRIDE), tl.constexpr(records.TOKEN_STRIDE)
PART, ROW_ITEMS = tl.constexpr(records.PART), tl.constexpr(records.ROW_ITEMS)
TABLE, HALF = tl.constexpr(records.TABLE), tl.constexpr(records.HALF)
NEOX, OFFSET = tl.constexpr(records.NEOX), tl.constexpr(records.OFFSET)
COUNT, SLOT = tl.constexpr(records.COUNT), tl.constexpr(records.SLOT)
POSITION, SOURCE = tl.constexpr(records.POSITION), tl.constexpr(records.SOURCE)
ORIGIN, ROW, BLOCKS = tl.constexpr(records.ORIGIN), tl.constexpr(records.ROW), tl.constexpr(records.BLOCKS)

NOT_SPECIAL = ["base", "tiles", "planes"]
"""Arguments that change from launch to launch and must not have the kernel compiled anew."""


@triton.jit
def _work(
    base,
    tiles,
    planes,
    TILE_WORDS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ITEM: tl.constexpr,
):
    """What this program copies: its tile and plane, which of its tokens there are, and where they lie on both sides.

    The grid is tiles and planes.
    """
    tile = tiles.to(tl.pointer_type(tl.int64)) + tl.program_id(0).to(tl.int64) * TILE_WORDS
    plane = planes.to(tl.pointer_type(tl.int64)) + tl.program_id(1).to(tl.int64) * PLANE_WORDS
    tokens = tl.arange(0, TOKENS)
    alive = tokens < tl.load(tile + COUNT)

    first_row = (base + tl.load(tile + ORIGIN) + tl.load(plane + PART)).to(tl.pointer_type(ITEM))
    rows = first_row + (tl.load(tile + ROW) + tokens) * tl.load(plane + ROW_ITEMS)

    slots = tl.load(tile + SLOT) + tokens
    blocks = tl.load(tile + BLOCKS + slots // BLOCK_SIZE, mask=alive, other=0)
    first_page = tl.load(plane + ADDRESS).to(tl.pointer_type(ITEM))
    within = slots % BLOCK_SIZE * tl.load(plane + TOKEN_STRIDE)
    pages = first_page + (blocks * tl.load(plane + BLOCK_STRIDE) + within)
    return tile, plane, alive, pages, rows


@triton.jit
def _copy(
    targets,
    target_head,
    sources,
    source_head,
    mask,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Copy what the mask has, of tokens and items, of the vectors of all heads."""
    columns = tl.arange(0, COLUMNS)[None, :]
    targets = targets[:, None] + columns
    sources = sources[:, None] + columns
    for head in tl.range(0, HEADS):
        # Addresses tell the compiler nothing: without the hints each item would be an access of its own.
        items = tl.load(tl.multiple_of(sources + head * source_head, (1, ALIGN)), mask=mask)
        tl.store(tl.multiple_of(targets + head * target_head, (1, ALIGN)), items, mask=mask)


@triton.jit
def _turn_halves(
    targets,
    target_head,
    sources,
    source_head,
    alive,
    half,
    cos,
    sin,
    HEADS: tl.constexpr,
    HALF_COLUMNS: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """The first half of a vector is paired with the second; each pair is turned by its angle."""
    columns = tl.arange(0, HALF_COLUMNS)[None, :]
    mask = alive[:, None] & (columns < half)
    for head in tl.range(0, HEADS):
        source = sources + head * source_head + columns
        target = targets + head * target_head + columns
        one = decode(tl.load(tl.multiple_of(source, (1, ALIGN)), mask=mask, other=0), DTYPE)
        other = decode(tl.load(tl.multiple_of(source + half, (1, ALIGN)), mask=mask, other=0), DTYPE)
        tl.store(tl.multiple_of(target, (1, ALIGN)), encode(one * cos - other * sin, DTYPE), mask=mask)
        tl.store(tl.multiple_of(target + half, (1, ALIGN)), encode(other * cos + one * sin, DTYPE), mask=mask)


@triton.jit
def _turn_neighbours(
    targets,
    target_head,
    sources,
    source_head,
    alive,
    half,
    cos,
    sin,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    HALF_COLUMNS: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Each two neighbours of a vector are turned by their angle."""
    columns = tl.arange(0, 2 * HALF_COLUMNS)[None, :]
    mask = alive[:, None] & (columns < 2 * half)
    for head in tl.range(0, HEADS):
        source = sources + head * source_head + columns
        target = targets + head * target_head + columns
        numbers = decode(tl.load(tl.multiple_of(source, (1, ALIGN)), mask=mask, other=0), DTYPE)
        one, other = tl.split(tl.reshape(numbers, (TOKENS, HALF_COLUMNS, 2)))
        turned = tl.join(one * cos - other * sin, other * cos + one * sin)
        items = encode(tl.reshape(turned, (TOKENS, 2 * HALF_COLUMNS)), DTYPE)
        tl.store(tl.multiple_of(target, (1, ALIGN)), items, mask=mask)


@triton.jit
def _turn(
    targets,
    target_head,
    sources,
    source_head,
    alive,
    plane,
    tile,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    HALF_COLUMNS: tl.constexpr,
    DTYPE: tl.constexpr,
    TURN_ITEMS: tl.constexpr,
    ALIGN: tl.constexpr,
    TABLE_ALIGN: tl.constexpr,
):
    """Write the part of each key that turns, turned from the position it was stored for to its new one."""
    half = tl.multiple_of(tl.load(plane + HALF), TURN_ITEMS)
    table = tl.load(plane + TABLE).to(tl.pointer_type(tl.float32))
    tokens = tl.arange(0, TOKENS)
    angles = tl.arange(0, HALF_COLUMNS)[None, :]
    pairs = alive[:, None] & (angles < half)
    new = table + ((tl.load(tile + POSITION) + tokens) * (2 * half))[:, None] + angles
    old = table + ((tl.load(tile + SOURCE) + tokens) * (2 * half))[:, None] + angles
    cos_new = tl.load(tl.multiple_of(new, (1, TABLE_ALIGN)), mask=pairs, other=1.0)
    sin_new = tl.load(tl.multiple_of(new + half, (1, TABLE_ALIGN)), mask=pairs, other=1.0)
    cos_old = tl.load(tl.multiple_of(old, (1, TABLE_ALIGN)), mask=pairs, other=1.0)
    sin_old = tl.load(tl.multiple_of(old + half, (1, TABLE_ALIGN)), mask=pairs, other=1.0)
    scale = cos_old * cos_old + sin_old * sin_old
    cos = (cos_new * cos_old + sin_new * sin_old) / scale
    sin = (sin_new * cos_old - cos_new * sin_old) / scale

    start = tl.load(plane + OFFSET)
    sources = sources[:, None] + start
    targets = targets[:, None] + start
    if tl.load(plane + NEOX) != 0:
        _turn_halves(
            targets, target_head, sources, source_head, alive, half, cos, sin, HEADS, HALF_COLUMNS, DTYPE, ALIGN
        )
    else:
        _turn_neighbours(
            targets, target_head, sources, source_head, alive, half, cos, sin, HEADS, TOKENS, HALF_COLUMNS, DTYPE, ALIGN
        )


@triton.jit(do_not_specialize=NOT_SPECIAL)
def rows_to_pages(
    base,
    tiles,
    planes,
    TILE_WORDS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KINDS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    KEY_COLUMNS: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
    ITEM: tl.constexpr,
    ALIGN: tl.constexpr,
    DTYPE: tl.constexpr,
    HALF_COLUMNS: tl.constexpr,
    TURN_ITEMS: tl.constexpr,
    TURN_ALIGN: tl.constexpr,
    TABLE_ALIGN: tl.constexpr,
):
    """Copy tiles from rows to pages, and turn keys that move.

    ``KINDS`` 2: planes are keys and values in turn; 1: they are keys. ``HALF_COLUMNS`` 0: no layer turns its keys.
    """
    tile, plane, alive, pages, rows = _work(base, tiles, planes, TILE_WORDS, TOKENS, BLOCK_SIZE, ITEM)
    page_head = tl.load(plane + HEAD_STRIDE)
    if tl.program_id(1) % KINDS == 0:
        columns = tl.arange(0, KEY_COLUMNS)[None, :]
        mask = alive[:, None] & (columns < KEY_WIDTH)
        if HALF_COLUMNS:  # noqa: SIM102  # decided when this is compiled
            if (tl.load(plane + TABLE) != 0) & (tl.load(tile + SOURCE) != tl.load(tile + POSITION)):
                start = tl.multiple_of(tl.load(plane + OFFSET), TURN_ITEMS)
                end = start + 2 * tl.multiple_of(tl.load(plane + HALF), TURN_ITEMS)
                mask &= (columns < start) | (columns >= end)
                _turn(
                    pages, page_head, rows, KEY_WIDTH, alive, plane, tile,
                    HEADS, TOKENS, HALF_COLUMNS, DTYPE, TURN_ITEMS, TURN_ALIGN, TABLE_ALIGN,
                )  # fmt: skip
        _copy(pages, page_head, rows, KEY_WIDTH, mask, HEADS, KEY_COLUMNS, ALIGN)
    else:
        mask = alive[:, None] & (tl.arange(0, VALUE_COLUMNS)[None, :] < VALUE_WIDTH)
        _copy(pages, page_head, rows, VALUE_WIDTH, mask, HEADS, VALUE_COLUMNS, ALIGN)


@triton.jit(do_not_specialize=NOT_SPECIAL)
def pages_to_rows(
    base,
    tiles,
    planes,
    TILE_WORDS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KINDS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    KEY_COLUMNS: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
    ITEM: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Copy tiles from pages to rows, as they are. Planes as in :func:`rows_to_pages`."""
    _, plane, alive, pages, rows = _work(base, tiles, planes, TILE_WORDS, TOKENS, BLOCK_SIZE, ITEM)
    page_head = tl.load(plane + HEAD_STRIDE)
    if tl.program_id(1) % KINDS == 0:
        mask = alive[:, None] & (tl.arange(0, KEY_COLUMNS)[None, :] < KEY_WIDTH)
        _copy(rows, KEY_WIDTH, pages, page_head, mask, HEADS, KEY_COLUMNS, ALIGN)
    else:
        mask = alive[:, None] & (tl.arange(0, VALUE_COLUMNS)[None, :] < VALUE_WIDTH)
        _copy(rows, VALUE_WIDTH, pages, page_head, mask, HEADS, VALUE_COLUMNS, ALIGN)
