"""The kernel of attention for chosen tokens: queries at any positions of prompts, over keys in the engine's pages.

A program answers the queries of one tile for one head of keys: a few tokens of one prompt, each with the heads that
share these keys. It walks over the prompt's keys up to the tile's last position. Keys up to the tile's first position
are seen by all of its tokens and need no mask.
"""

import triton
import triton.language as tl

from blendhub_cuda.dtypes import decode

TILE_WORDS = tl.constexpr(5)
"""A tile as words of int32: its prompt, the place of its first query in ``order``, how many queries it has, and its
first and its last position."""

CHANGING = [
    "sums_part",
    "table_stride",
    "readable_stride",
    "part_keys",
    "scale",
    "key_scale",
    "value_scale",
]
LOG2_E = tl.constexpr(1.4426950408889634)
"""Scores are scaled so that GPUs, which compute powers of 2, need no product for each power of e."""


@triton.jit
def _read(addresses, mask, MASKED: tl.constexpr, DTYPE: tl.constexpr, AS: tl.constexpr):
    """Items of pages, as the type in which they are multiplied. ``DTYPE``: that of 8-bit floats, which are integers."""
    items = tl.load(addresses, mask=mask, other=0) if MASKED else tl.load(addresses)
    if DTYPE != "":
        items = decode(items, DTYPE)
    return items.to(AS)


@triton.jit
def _walk(
    start, end, queries, queries_rest, positions, weights, total, highest,
    keys, values, entries, readable, key_block, key_token, value_block, value_token, scale,
    KEYS: tl.constexpr, BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, VALUE_COLUMNS: tl.constexpr, LATENT: tl.constexpr, DTYPE: tl.constexpr,
    AS: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, SOFT_CAP: tl.constexpr, PARTLY: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Add what the queries take from the keys in ``[start, end)``; ``start`` is a multiple of ``KEYS``."""
    columns, rest = tl.arange(0, MAIN), MAIN + tl.arange(0, REST if REST else 1)
    value_columns = tl.arange(0, VALUE_COLUMNS)
    for first in range(start, end, KEYS):
        at = first + tl.arange(0, KEYS)
        there = at < end
        if MASKED:
            block = tl.load(entries + at // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
        else:
            block = tl.load(entries + at // BLOCK_SIZE).to(tl.int64)
        rows = keys + block * key_block + at % BLOCK_SIZE * key_token
        mask = there[None, :] & (columns < WIDTH)[:, None]
        read = _read(rows[None, :] + columns[:, None], mask, MASKED or WIDTH < MAIN, DTYPE, AS)
        scores = tl.dot(queries, read, input_precision="ieee")
        if REST:
            more = _read(rows[None, :] + rest[:, None], there[None, :], MASKED, DTYPE, AS)
            scores += tl.dot(queries_rest, more, input_precision="ieee")
        if SOFT_CAP > 0:
            # tanh by powers, which all backends of Triton have.
            scores *= scale
            folded = tl.exp2(tl.abs(scores) * (-2 * LOG2_E / SOFT_CAP))
            size = (1 - folded) / (1 + folded) * (SOFT_CAP * LOG2_E)
            scores = tl.where(scores < 0, -size, size)
        else:
            scores *= scale * LOG2_E
        if MASKED:
            seen = there[None, :] & (at[None, :] <= positions[:, None])
            if PARTLY:
                seen &= (tl.load(readable + at, mask=there, other=0) != 0)[None, :]
            if WINDOW:
                seen &= at[None, :] > positions[:, None] - WINDOW
            if CHUNK:
                seen &= at[None, :] >= (positions // CHUNK * CHUNK)[:, None]
            scores = tl.where(seen, scores, float("-inf"))
        # Not tl.max and tl.sum: the interpreter runs those only where all of Triton was imported for it.
        higher = tl.maximum(highest, tl.reduce(scores, 1, tl.standard._elementwise_max))
        # A row that has seen no key yet keeps minus infinity, of which no difference may be taken.
        base = tl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher
        part = tl.exp2(scores - base[:, None])
        fade = tl.exp2(highest - base)
        total = total * fade + tl.reduce(part, 1, tl.standard._sum_combine)
        if LATENT:
            taken = tl.trans(read)
        else:
            places = values + block * value_block + at % BLOCK_SIZE * value_token
            value_mask = there[:, None] & (value_columns < VALUE_WIDTH)[None, :]
            at_value = places[:, None] + value_columns[None, :]
            taken = _read(at_value, value_mask, MASKED or VALUE_WIDTH < VALUE_COLUMNS, DTYPE, AS)
        weights = weights * fade[:, None] + tl.dot(part.to(AS), taken, input_precision="ieee")
        highest = higher
    return weights, total, highest


@triton.jit(do_not_specialize=CHANGING)
def attend_chosen(
    out, out_part: tl.int64, out_token, out_head, sums, sums_part: tl.int64, queries, query_token, query_head,
    keys, key_block, key_token, key_head, values, value_block, value_token, value_head,
    order, positions, tiles, table, table_stride, readable, readable_stride, part_keys, sinks,
    scale, key_scale, value_scale,
    TOKENS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, VALUE_COLUMNS: tl.constexpr, LATENT: tl.constexpr, DTYPE: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, SOFT_CAP: tl.constexpr, SINKS: tl.constexpr, PARTLY: tl.constexpr,
):  # fmt: skip
    """On axis 0 are heads of keys, each as often as its ``GROUP`` of query heads fills programs; tiles are on axis 1.

    GPUs begin with axis 0, so all heads of a tile run together; the first tiles should be those that take longest.

    A program has ``HEADS`` heads of ``TOKENS`` tokens, in ``ROWS`` rows. A key has ``WIDTH`` items: the first ``MAIN``,
    and ``REST`` more. ``LATENT``: the values are the first items of the keys. ``WINDOW`` or ``CHUNK`` 0: without it.
    """
    SLICES: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    AS: tl.constexpr = queries.dtype.element_ty
    tile = tiles + tl.program_id(1) * TILE_WORDS
    prompt, first, count = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    least, last = tl.load(tile + 3), tl.load(tile + 4)
    key_number = tl.program_id(0) // SLICES
    row = tl.arange(0, ROWS)
    token, in_group = row // HEADS, tl.program_id(0) % SLICES * HEADS + row % HEADS
    alive = (token < count) & (token < TOKENS) & (in_group < GROUP)
    query = tl.load(order + first + token, mask=alive, other=0).to(tl.int64)
    head = key_number * GROUP + in_group
    at = tl.load(positions + query, mask=alive, other=-1)

    columns, rest = tl.arange(0, MAIN), MAIN + tl.arange(0, REST if REST else 1)
    asked = queries + query * query_token + head * query_head
    own = tl.load(asked[:, None] + columns[None, :], mask=alive[:, None] & (columns < WIDTH)[None, :], other=0)
    own_rest = tl.load(asked[:, None] + rest[None, :], mask=alive[:, None] & (rest < WIDTH)[None, :], other=0)

    weights = tl.full([ROWS, VALUE_COLUMNS], 0, tl.float32)
    if SINKS:
        # Only the first part has the sink.
        is_first = tl.program_id(2) == 0
        highest = tl.load(sinks + head, mask=alive, other=0).to(tl.float32) * LOG2_E
        highest = tl.where(is_first, highest, float("-inf"))
        total = tl.where(is_first, tl.full([ROWS], 1, tl.float32), 0.0)
    else:
        highest = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.full([ROWS], 0, tl.float32)

    keys += key_number.to(tl.int64) * key_head
    values += key_number.to(tl.int64) * value_head
    entries = table + prompt.to(tl.int64) * table_stride
    begin, end = 0, last + 1
    seen_by_all = (least + 1) // KEYS * KEYS
    if WINDOW:
        begin = tl.maximum(0, least - WINDOW + 1) // KEYS * KEYS
    if CHUNK:
        begin = tl.maximum(begin, least // CHUNK * CHUNK // KEYS * KEYS)
    if PARTLY:
        readable += prompt.to(tl.int64) * readable_stride
        begin = tl.maximum(begin, tl.program_id(2) * part_keys)
        end = tl.minimum(end, (tl.program_id(2) + 1) * part_keys)
    if WINDOW or CHUNK or PARTLY:
        seen_by_all = begin
    else:
        weights, total, highest = _walk(
            begin, seen_by_all, own, own_rest, at, weights, total, highest,
            keys, values, entries, readable, key_block, key_token, value_block, value_token, scale * key_scale,
            KEYS, BLOCK_SIZE, WIDTH, MAIN, REST, VALUE_WIDTH, VALUE_COLUMNS, LATENT, DTYPE, AS,
            WINDOW, CHUNK, SOFT_CAP, PARTLY, False,
        )  # fmt: skip
    weights, total, highest = _walk(
        seen_by_all, end, own, own_rest, at, weights, total, highest,
        keys, values, entries, readable, key_block, key_token, value_block, value_token, scale * key_scale,
        KEYS, BLOCK_SIZE, WIDTH, MAIN, REST, VALUE_WIDTH, VALUE_COLUMNS, LATENT, DTYPE, AS,
        WINDOW, CHUNK, SOFT_CAP, PARTLY, True,
    )  # fmt: skip

    answer = weights * (value_scale / tl.where(total > 0, total, 1))[:, None]
    value_columns = tl.arange(0, VALUE_COLUMNS)
    if PARTLY:
        out += tl.program_id(2) * out_part
    places = out + query * out_token + head * out_head
    mask = alive[:, None] & (value_columns < VALUE_WIDTH)[None, :]
    tl.store(places[:, None] + value_columns[None, :], answer.to(out.dtype.element_ty), mask=mask)
    if PARTLY:
        heads = tl.num_programs(0) // SLICES * GROUP
        base = tl.where(total > 0, highest + tl.log2(tl.where(total > 0, total, 1)), float("-inf"))
        tl.store(sums + tl.program_id(2) * sums_part + query * heads + head, base / LOG2_E, mask=alive)
