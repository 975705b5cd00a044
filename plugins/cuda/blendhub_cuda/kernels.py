"""The kernel that copies between rows of the arena, or of staging, and blocks of pages: all layers, keys and values.

It gets addresses, because one launch serves the tensors of all layers. Nothing is checked here: what reaches the
kernel was checked by :class:`blendhub.contracts.Device`.

A program copies one tile, at most ``TOKENS`` tokens of a batch, of one layer's keys or values. The masks keep it from
everything else, and tokens that are skipped are in no batch, so they are never touched.
"""

import triton
import triton.language as tl

from blendhub.devices import batches
from blendhub_cuda.dtypes import decode, encode

PLANE_WORDS = tl.constexpr(8)
"""A plane is one layer's keys or values in the pages, as words of int64. Strides are in items."""
ADDRESS, BLOCK_STRIDE, HEAD_STRIDE, TOKEN_STRIDE = (tl.constexpr(word) for word in range(4))
TABLE, HALF, NEOX, OFFSET = (tl.constexpr(word) for word in range(4, 8))
"""Address of ``cos_sin``, or 0 without a rotation; its angles for a position; its pairing; its offset in a key."""
SLOT, POSITION, SOURCE = (tl.constexpr(row) for row in (batches.SLOT, batches.POSITION, batches.SOURCE))

CHANGING = ["base", "planes", "table", "columns", "first_row", "n_rows", "n_tokens", "moved"]
"""Arguments that differ between launches; specializing on them would compile the kernel again."""


@triton.jit
def _copy(
    pages, page_head, rows, width, mask, columns, HEADS: tl.constexpr, ALIGN: tl.constexpr, TO_PAGES: tl.constexpr
):
    """Copy the masked tokens and items of all heads."""
    in_pages = pages[:, None] + columns
    in_rows = rows[:, None] + columns
    for head in tl.range(0, HEADS):
        # The addresses are computed, so without these hints the compiler would access each item separately.
        page = tl.multiple_of(in_pages + head * page_head, (1, ALIGN))
        row = tl.multiple_of(in_rows + head * width, (1, ALIGN))
        if TO_PAGES:
            tl.store(page, tl.load(row, mask=mask), mask=mask)
        else:
            tl.store(row, tl.load(page, mask=mask), mask=mask)


@triton.jit
def _rotate_neox(
    targets, target_head, sources, source_head, alive, half, cos, sin,
    HEADS: tl.constexpr, HALF_COLUMNS: tl.constexpr, DTYPE: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Rotate pairs that consist of an item of the first half and one of the second half."""
    columns = tl.arange(0, HALF_COLUMNS)[None, :]
    mask = alive[:, None] & (columns < half)
    for head in tl.range(0, HEADS):
        source = sources + head * source_head + columns
        target = targets + head * target_head + columns
        first = decode(tl.load(tl.multiple_of(source, (1, ALIGN)), mask=mask, other=0), DTYPE)
        second = decode(tl.load(tl.multiple_of(source + half, (1, ALIGN)), mask=mask, other=0), DTYPE)
        tl.store(tl.multiple_of(target, (1, ALIGN)), encode(first * cos - second * sin, DTYPE), mask=mask)
        tl.store(tl.multiple_of(target + half, (1, ALIGN)), encode(second * cos + first * sin, DTYPE), mask=mask)


@triton.jit
def _rotate_interleaved(
    targets, target_head, sources, source_head, alive, half, cos, sin,
    HEADS: tl.constexpr, TOKENS: tl.constexpr, HALF_COLUMNS: tl.constexpr, DTYPE: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Rotate pairs of neighbouring items."""
    columns = tl.arange(0, 2 * HALF_COLUMNS)[None, :]
    mask = alive[:, None] & (columns < 2 * half)
    for head in tl.range(0, HEADS):
        source = sources + head * source_head + columns
        target = targets + head * target_head + columns
        numbers = decode(tl.load(tl.multiple_of(source, (1, ALIGN)), mask=mask, other=0), DTYPE)
        first, second = tl.split(tl.reshape(numbers, (TOKENS, HALF_COLUMNS, 2)))
        rotated = tl.join(first * cos - second * sin, second * cos + first * sin)
        items = encode(tl.reshape(rotated, (TOKENS, 2 * HALF_COLUMNS)), DTYPE)
        tl.store(tl.multiple_of(target, (1, ALIGN)), items, mask=mask)


@triton.jit
def _angles(plane, positions, alive, half, HALF_COLUMNS: tl.constexpr, TABLE_ALIGN: tl.constexpr):
    """The cosines and sines of these positions."""
    angles = tl.arange(0, HALF_COLUMNS)[None, :]
    mask = alive[:, None] & (angles < half)
    table = tl.load(plane + TABLE).to(tl.pointer_type(tl.float32))
    rows = table + (positions.to(tl.int64) * (2 * half))[:, None] + angles
    cos = tl.load(tl.multiple_of(rows, (1, TABLE_ALIGN)), mask=mask, other=1.0)
    sin = tl.load(tl.multiple_of(rows + half, (1, TABLE_ALIGN)), mask=mask, other=1.0)
    return cos, sin


@triton.jit(do_not_specialize=CHANGING)
def copy_tokens(
    base: tl.int64, planes: tl.int64, table: tl.int64, columns, first_row, n_rows, n_tokens, moved,
    TOKENS: tl.constexpr, BLOCK_SIZE: tl.constexpr, KINDS: tl.constexpr, HEADS: tl.constexpr,
    KEY_WIDTH: tl.constexpr, KEY_COLUMNS: tl.constexpr, VALUE_WIDTH: tl.constexpr, VALUE_COLUMNS: tl.constexpr,
    DTYPE: tl.constexpr, ITEM: tl.constexpr, ALIGN: tl.constexpr, TO_PAGES: tl.constexpr,
    HALF_COLUMNS: tl.constexpr, ROTATED_ALIGN: tl.constexpr, ROTATED_ITEMS: tl.constexpr, TABLE_ALIGN: tl.constexpr,
):  # fmt: skip
    """Copy a batch from rows to pages, and rotate moved keys, or from pages to rows. Tiles are on axis 0, planes on 1.

    Addresses are annotated, because Triton passes small numbers in 32 bits, and a heap may begin at small addresses.
    ``KINDS`` 2: planes alternate between keys and values; 1: all are keys. ``HALF_COLUMNS`` 0: nothing is rotated.
    """
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    alive = tokens < n_tokens
    plane = planes.to(tl.pointer_type(tl.int64)) + tl.program_id(1) * PLANE_WORDS
    entries = table.to(tl.pointer_type(tl.int32)) + tokens

    slots = tl.load(entries + SLOT * columns, mask=alive, other=0).to(tl.int64)
    first_page = tl.load(plane + ADDRESS).to(tl.pointer_type(ITEM))
    within = slots % BLOCK_SIZE * tl.load(plane + TOKEN_STRIDE)
    pages = first_page + slots // BLOCK_SIZE * tl.load(plane + BLOCK_STRIDE) + within
    page_head = tl.load(plane + HEAD_STRIDE)

    # A layer's keys and then its values, each of ``n_rows`` rows.
    layer_items = HEADS * (KEY_WIDTH + VALUE_WIDTH) * n_rows.to(tl.int64)
    rows = base.to(tl.pointer_type(ITEM)) + tl.program_id(1) // KINDS * layer_items
    row = (first_row + tokens).to(tl.int64)
    if tl.program_id(1) % KINDS == 0:
        keys = rows + row * (HEADS * KEY_WIDTH)
        items = tl.arange(0, KEY_COLUMNS)[None, :]
        mask = alive[:, None] & (items < KEY_WIDTH)
        if HALF_COLUMNS:  # noqa: SIM102  # decided at compile time
            if (tl.load(plane + TABLE) != 0) & (moved != 0):
                start = tl.multiple_of(tl.load(plane + OFFSET), ROTATED_ITEMS)
                half = tl.multiple_of(tl.load(plane + HALF), ROTATED_ITEMS)
                mask &= (items < start) | (items >= start + 2 * half)
                new = tl.load(entries + POSITION * columns, mask=alive, other=0)
                old = tl.load(entries + SOURCE * columns, mask=alive, other=0)
                cos_new, sin_new = _angles(plane, new, alive, half, HALF_COLUMNS, TABLE_ALIGN)
                cos_old, sin_old = _angles(plane, old, alive, half, HALF_COLUMNS, TABLE_ALIGN)
                scale = cos_old * cos_old + sin_old * sin_old
                cos = (cos_new * cos_old + sin_new * sin_old) / scale
                sin = (sin_new * cos_old - cos_new * sin_old) / scale
                to, parts = pages[:, None] + start, keys[:, None] + start
                if tl.load(plane + NEOX) != 0:
                    _rotate_neox(
                        to, page_head, parts, KEY_WIDTH, alive, half, cos, sin,
                        HEADS, HALF_COLUMNS, DTYPE, ROTATED_ALIGN,
                    )  # fmt: skip
                else:
                    _rotate_interleaved(
                        to, page_head, parts, KEY_WIDTH, alive, half, cos, sin,
                        HEADS, TOKENS, HALF_COLUMNS, DTYPE, ROTATED_ALIGN,
                    )  # fmt: skip
        _copy(pages, page_head, keys, KEY_WIDTH, mask, items, HEADS, ALIGN, TO_PAGES)
    else:
        values = rows + HEADS * KEY_WIDTH * n_rows.to(tl.int64) + row * (HEADS * VALUE_WIDTH)
        value_items = tl.arange(0, VALUE_COLUMNS)[None, :]
        value_mask = alive[:, None] & (value_items < VALUE_WIDTH)
        _copy(pages, page_head, values, VALUE_WIDTH, value_mask, value_items, HEADS, ALIGN, TO_PAGES)
