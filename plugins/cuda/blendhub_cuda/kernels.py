"""Kernels that copy between rows of the arena, or of staging, and blocks of pages: all layers, keys and values at once.

They group on addresses, because one launch serves the tensors of all layers. Nothing is checked here: what reaches a
kernel was checked by :mod:`blendhub.devices`.

A program copies one tile, at most ``TOKENS`` tokens of one segment, of one layer's keys or values. The masks keep_alive
it from everything else, so what is skipped is never touched: no program is started for it.
"""

import triton
import triton.language as tl

from blendhub_cuda import records
from blendhub_cuda.dtypes import decode, encode

PLANE_WORDS = tl.constexpr(records.PLANE_WORDS)
ADDRESS, BLOCK_STRIDE = tl.constexpr(records.ADDRESS), tl.constexpr(records.BLOCK_STRIDE)
HEAD_STRIDE, TOKEN_STRIDE = tl.constexpr(records.HEAD_STRIDE), tl.constexpr(records.TOKEN_STRIDE)
SHARD_OFFSET, ROW_ITEMS = tl.constexpr(records.SHARD_OFFSET), tl.constexpr(records.ROW_ITEMS)
TABLE, HALF = tl.constexpr(records.TABLE), tl.constexpr(records.HALF)
NEOX, OFFSET = tl.constexpr(records.NEOX), tl.constexpr(records.OFFSET)
COUNT, SLOT = tl.constexpr(records.COUNT), tl.constexpr(records.SLOT)
POSITION, SOURCE = tl.constexpr(records.POSITION), tl.constexpr(records.SOURCE)
ORIGIN, ROW, BLOCKS = tl.constexpr(records.ORIGIN), tl.constexpr(records.ROW), tl.constexpr(records.BLOCKS)

NOT_SPECIAL = ["base", "tiles", "planes"]
"""Arguments that differ between launches; specializing on them would compile the kernel again."""


@triton.jit
def _addresses(
    base,
    tiles,
    planes,
    TILE_WORDS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ITEM: tl.constexpr,
):
    """This program's tile and plane, the mask of its tokens, and their addresses in pages and in rows.

    The grid has tiles on axis 0 and planes on axis 1.
    """
    tile = tiles.to(tl.pointer_type(tl.int64)) + tl.program_id(0).to(tl.int64) * TILE_WORDS
    plane = planes.to(tl.pointer_type(tl.int64)) + tl.program_id(1).to(tl.int64) * PLANE_WORDS
    tokens = tl.arange(0, TOKENS)
    alive = tokens < tl.load(tile + COUNT)

    first_row = (base + tl.load(tile + ORIGIN) + tl.load(plane + SHARD_OFFSET)).to(tl.pointer_type(ITEM))
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
    """Copy the masked tokens and items of all heads."""
    columns = tl.arange(0, COLUMNS)[None, :]
    targets = targets[:, None] + columns
    sources = sources[:, None] + columns
    for head in tl.range(0, HEADS):
        # The addresses are computed, so without these hints the compiler would access each item separately.
        items = tl.load(tl.multiple_of(sources + head * source_head, (1, ALIGN)), mask=mask)
        tl.store(tl.multiple_of(targets + head * target_head, (1, ALIGN)), items, mask=mask)


@triton.jit
def _rotate_neox(
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
    """Rotate pairs that consist of an item of the first half and one of the second half."""
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
def _rotate_interleaved(
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
    """Rotate pairs of neighbouring items."""
    columns = tl.arange(0, 2 * HALF_COLUMNS)[None, :]
    mask = alive[:, None] & (columns < 2 * half)
    for head in tl.range(0, HEADS):
        source = sources + head * source_head + columns
        target = targets + head * target_head + columns
        numbers = decode(tl.load(tl.multiple_of(source, (1, ALIGN)), mask=mask, other=0), DTYPE)
        one, other = tl.split(tl.reshape(numbers, (TOKENS, HALF_COLUMNS, 2)))
        rotated = tl.join(one * cos - other * sin, other * cos + one * sin)
        items = encode(tl.reshape(rotated, (TOKENS, 2 * HALF_COLUMNS)), DTYPE)
        tl.store(tl.multiple_of(target, (1, ALIGN)), items, mask=mask)


@triton.jit
def _rotate(
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
    ROTATED_ITEMS: tl.constexpr,
    ALIGN: tl.constexpr,
    TABLE_ALIGN: tl.constexpr,
):
    """Write the rotated part of each key, from the position it was stored for to its new one."""
    half = tl.multiple_of(tl.load(plane + HALF), ROTATED_ITEMS)
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
        _rotate_neox(
            targets, target_head, sources, source_head, alive, half, cos, sin, HEADS, HALF_COLUMNS, DTYPE, ALIGN
        )
    else:
        _rotate_interleaved(
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
    ROTATED_ITEMS: tl.constexpr,
    ROTATED_ALIGN: tl.constexpr,
    TABLE_ALIGN: tl.constexpr,
):
    """Copy tiles from rows to pages, and rotate moved keys.

    ``KINDS`` 2: planes alternate between keys and values; 1: all are keys. ``HALF_COLUMNS`` 0: no layer has a rotation.
    """
    tile, plane, alive, pages, rows = _addresses(base, tiles, planes, TILE_WORDS, TOKENS, BLOCK_SIZE, ITEM)
    page_head = tl.load(plane + HEAD_STRIDE)
    if tl.program_id(1) % KINDS == 0:
        columns = tl.arange(0, KEY_COLUMNS)[None, :]
        mask = alive[:, None] & (columns < KEY_WIDTH)
        if HALF_COLUMNS:  # noqa: SIM102  # decided at compile time
            if (tl.load(plane + TABLE) != 0) & (tl.load(tile + SOURCE) != tl.load(tile + POSITION)):
                start = tl.multiple_of(tl.load(plane + OFFSET), ROTATED_ITEMS)
                end = start + 2 * tl.multiple_of(tl.load(plane + HALF), ROTATED_ITEMS)
                mask &= (columns < start) | (columns >= end)
                _rotate(
                    pages, page_head, rows, KEY_WIDTH, alive, plane, tile,
                    HEADS, TOKENS, HALF_COLUMNS, DTYPE, ROTATED_ITEMS, ROTATED_ALIGN, TABLE_ALIGN,
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
    """Copy tiles from pages to rows, without rotation. Planes as in :func:`rows_to_pages`."""
    _, plane, alive, pages, rows = _addresses(base, tiles, planes, TILE_WORDS, TOKENS, BLOCK_SIZE, ITEM)
    page_head = tl.load(plane + HEAD_STRIDE)
    if tl.program_id(1) % KINDS == 0:
        mask = alive[:, None] & (tl.arange(0, KEY_COLUMNS)[None, :] < KEY_WIDTH)
        _copy(rows, KEY_WIDTH, pages, page_head, mask, HEADS, KEY_COLUMNS, ALIGN)
    else:
        mask = alive[:, None] & (tl.arange(0, VALUE_COLUMNS)[None, :] < VALUE_WIDTH)
        _copy(rows, VALUE_WIDTH, pages, page_head, mask, HEADS, VALUE_COLUMNS, ALIGN)
