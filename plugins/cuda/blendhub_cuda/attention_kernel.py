"""The kernels of attention for chosen tokens: queries at any positions of prompts, over keys in the engine's pages.

A program of ``attend_chosen`` answers the queries of one tile for one head of keys: a few tokens of one prompt, each
with the heads that share these keys. It walks over the prompt's keys up to the tile's last position. Keys up to the
tile's first position are seen by all of its tokens and need no mask.

A probe's tokens attend to readable keys, which are cut in parts, and as one more part to each other's, which are in no
page. ``merge_parts`` puts these together, and ``add_received`` adds up what each readable key was attended to.
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
def _scores(
    queries, queries_rest, rows, there, scale,
    WIDTH: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr, SOFT_CAP: tl.constexpr, DTYPE: tl.constexpr,
    AS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The products of queries with the keys at these addresses, as powers of 2; and the first items of the keys."""
    columns, rest = tl.arange(0, MAIN), MAIN + tl.arange(0, REST if REST else 1)
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
    return scores, read


@triton.jit
def _seen(at, there, positions, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """Which of the keys at positions ``at`` the rows at ``positions`` attend to."""
    seen = there[None, :] & (at[None, :] <= positions[:, None])
    if WINDOW:
        seen &= at[None, :] > positions[:, None] - WINDOW
    if CHUNK:
        seen &= at[None, :] >= (positions // CHUNK * CHUNK)[:, None]
    return seen


@triton.jit
def _walk(
    start, end, queries, queries_rest, positions, weights, total, highest,
    keys, values, entries, marks, key_block, key_token, value_block, value_token, scale,
    KEYS: tl.constexpr, BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, VALUE_COLUMNS: tl.constexpr, LATENT: tl.constexpr, DTYPE: tl.constexpr,
    AS: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, SOFT_CAP: tl.constexpr, PARTLY: tl.constexpr,
    OWN: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add what the queries take from the keys in ``[start, end)``; of pages ``start`` is a multiple of ``KEYS``.

    ``OWN``: keys of tokens, whose numbers are the entries; they have no pages. ``marks``: which keys in pages are
    readable, and the positions of tokens.
    """
    value_columns = tl.arange(0, VALUE_COLUMNS)
    for first in range(start, end, KEYS):
        place = first + tl.arange(0, KEYS)
        there = place < end
        entry = entries + (place if OWN else place // BLOCK_SIZE)
        block = (tl.load(entry, mask=there, other=0) if MASKED else tl.load(entry)).to(tl.int64)
        rows, places = keys + block * key_block, values + block * value_block
        at = place
        if OWN:
            at = tl.load(marks + block, mask=there, other=0)
        else:
            rows += place % BLOCK_SIZE * key_token
            places += place % BLOCK_SIZE * value_token
        scores, read = _scores(
            queries, queries_rest, rows, there, scale, WIDTH, MAIN, REST, SOFT_CAP, DTYPE, AS, MASKED
        )  # fmt: skip
        if MASKED:
            seen = _seen(at, there, positions, WINDOW, CHUNK)
            if PARTLY and not OWN:
                seen &= (tl.load(marks + place, mask=there, other=0) != 0)[None, :]
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
            value_mask = there[:, None] & (value_columns < VALUE_WIDTH)[None, :]
            at_value = places[:, None] + value_columns[None, :]
            taken = _read(at_value, value_mask, MASKED or VALUE_WIDTH < VALUE_COLUMNS, DTYPE, AS)
        weights = weights * fade[:, None] + tl.dot(part.to(AS), taken, input_precision="ieee")
        highest = higher
    return weights, total, highest


@triton.jit
def _asked(
    queries, query_token, query_head, query, head, alive, WIDTH: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr
):  # fmt: skip
    """The queries of some tokens' heads: their first items, and the rest."""
    columns, rest = tl.arange(0, MAIN), MAIN + tl.arange(0, REST if REST else 1)
    asked = queries + query * query_token + head * query_head
    main = tl.load(asked[:, None] + columns[None, :], mask=alive[:, None] & (columns < WIDTH)[None, :], other=0)
    return main, tl.load(asked[:, None] + rest[None, :], mask=alive[:, None] & (rest < WIDTH)[None, :], other=0)


@triton.jit(do_not_specialize=CHANGING)
def attend_chosen(
    out, out_part: tl.int64, out_token, out_head, sums, sums_part: tl.int64, queries, query_token, query_head,
    keys, key_block, key_token, key_head, values, value_block, value_token, value_head,
    order, positions, tiles, table, table_stride, readable, readable_stride, part_keys, sinks,
    own_keys, own_key_token, own_key_head, own_values, own_value_token, own_value_head, starts,
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

    ``PARTLY``: parts of readable keys are on axis 2, and at its end the tokens' own keys. ``starts`` says where in
    ``order`` each prompt begins.
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
    own, own_rest = _asked(queries, query_token, query_head, query, head, alive, WIDTH, MAIN, REST)

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
        is_own = tl.program_id(2) == tl.num_programs(2) - 1
        begin = tl.maximum(begin, tl.program_id(2) * part_keys)
        end = tl.where(is_own, begin, tl.minimum(end, (tl.program_id(2) + 1) * part_keys))
    if WINDOW or CHUNK or PARTLY:
        seen_by_all = begin
    else:
        weights, total, highest = _walk(
            begin, seen_by_all, own, own_rest, at, weights, total, highest,
            keys, values, entries, readable, key_block, key_token, value_block, value_token, scale * key_scale,
            KEYS, BLOCK_SIZE, WIDTH, MAIN, REST, VALUE_WIDTH, VALUE_COLUMNS, LATENT, DTYPE, AS,
            WINDOW, CHUNK, SOFT_CAP, PARTLY, False, False,
        )  # fmt: skip
    weights, total, highest = _walk(
        seen_by_all, end, own, own_rest, at, weights, total, highest,
        keys, values, entries, readable, key_block, key_token, value_block, value_token, scale * key_scale,
        KEYS, BLOCK_SIZE, WIDTH, MAIN, REST, VALUE_WIDTH, VALUE_COLUMNS, LATENT, DTYPE, AS,
        WINDOW, CHUNK, SOFT_CAP, PARTLY, False, True,
    )  # fmt: skip
    weights *= value_scale
    if PARTLY:
        own_keys += key_number.to(tl.int64) * own_key_head
        own_values += key_number.to(tl.int64) * own_value_head
        begin = tl.load(starts + prompt)
        end = tl.where(is_own, first + count, begin)
        weights, total, highest = _walk(
            begin, end, own, own_rest, at, weights, total, highest,
            own_keys, own_values, order, positions, own_key_token, 0, own_value_token, 0, scale,
            KEYS, BLOCK_SIZE, WIDTH, MAIN, REST, VALUE_WIDTH, VALUE_COLUMNS, LATENT, "", AS,
            WINDOW, CHUNK, SOFT_CAP, PARTLY, True, True,
        )  # fmt: skip

    answer = weights / tl.where(total > 0, total, 1)[:, None]
    value_columns = tl.arange(0, VALUE_COLUMNS)
    if PARTLY:
        out += tl.program_id(2) * out_part
    places = out + query * out_token + head * out_head
    mask = alive[:, None] & (value_columns < VALUE_WIDTH)[None, :]
    tl.store(places[:, None] + value_columns[None, :], answer.to(out.dtype.element_ty), mask=mask)
    if PARTLY:
        heads = tl.num_programs(0) // SLICES * GROUP
        base = tl.where(total > 0, highest + tl.log2(tl.where(total > 0, total, 1)), float("-inf"))
        tl.store(sums + tl.program_id(2) * sums_part + query * heads + head, base, mask=alive)


@triton.jit(do_not_specialize=["sums_part", "n_parts"])
def merge_parts(
    out, out_token, out_head, log_sums, taken, taken_part: tl.int64, sums, sums_part: tl.int64, n_parts,
    VALUE_WIDTH: tl.constexpr, VALUE_COLUMNS: tl.constexpr,
):  # fmt: skip
    """What each token, on axis 0, takes for each head, on axis 1, from all parts; and the sum of its weights, as a
    power of 2."""
    token, head, heads = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    columns = tl.arange(0, VALUE_COLUMNS)
    row = token * heads + head
    whole = tl.full([VALUE_COLUMNS], 0, tl.float32)
    highest, total = float("-inf"), 0.0
    for part in range(n_parts):
        sum_of_part = tl.load(sums + part * sums_part + row)
        higher = tl.maximum(highest, sum_of_part)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        fade, share = tl.exp2(highest - base), tl.exp2(sum_of_part - base)
        of_part = tl.load(taken + part * taken_part + row * VALUE_WIDTH + columns, mask=columns < VALUE_WIDTH, other=0)
        whole, total, highest = whole * fade + of_part * share, total * fade + share, higher
    answer = whole / tl.where(total > 0, total, 1)
    places = out + token * out_token + head * out_head + columns
    tl.store(places, answer.to(out.dtype.element_ty), mask=columns < VALUE_WIDTH)
    tl.store(log_sums + row, tl.where(total > 0, highest + tl.log2(tl.where(total > 0, total, 1)), float("-inf")))


@triton.jit(do_not_specialize=["received_stride", "n_keys", *CHANGING])
def add_received(
    received, received_stride, n_keys, log_sums, queries, query_token, query_head, keys, key_block, key_token, key_head,
    order, positions, starts, table, table_stride, readable, readable_stride, scale, key_scale,
    N_HEADS: tl.constexpr, TOKENS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr,
    DTYPE: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, SOFT_CAP: tl.constexpr,
):  # fmt: skip
    """Add to each readable key the weights that the tokens of its prompt give it, in all heads.

    A program has ``KEYS`` keys, on axis 0, of one prompt, on axis 1. No two programs add to one key, so sums do not
    depend on which runs first.
    """
    SLICES: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    AS: tl.constexpr = queries.dtype.element_ty
    prompt = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    there = place < n_keys
    there &= tl.load(readable + prompt * readable_stride + place, mask=there, other=0) != 0
    block = tl.load(table + prompt * table_stride + place // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
    rows = keys + block * key_block + place % BLOCK_SIZE * key_token
    row = tl.arange(0, ROWS)
    total = tl.full([KEYS], 0, tl.float32)
    end = tl.load(starts + prompt + 1)
    for first in range(tl.load(starts + prompt), end, TOKENS):
        token = first + row // HEADS
        for part in range(N_HEADS * SLICES):
            key_number, in_group = part // SLICES, part % SLICES * HEADS + row % HEADS
            alive = (row // HEADS < TOKENS) & (token < end) & (in_group < GROUP)
            query = tl.load(order + token, mask=alive, other=0).to(tl.int64)
            head = key_number * GROUP + in_group
            at = tl.load(positions + query, mask=alive, other=-1)
            own, own_rest = _asked(queries, query_token, query_head, query, head, alive, WIDTH, MAIN, REST)
            of_head = rows + key_number * key_head
            scores, _ = _scores(
                own, own_rest, of_head, there, scale * key_scale, WIDTH, MAIN, REST, SOFT_CAP, DTYPE, AS, True
            )  # fmt: skip
            base = tl.load(log_sums + query * (N_HEADS * GROUP) + head, mask=alive, other=0)
            # A token that saw no key has minus infinity, and none of these is seen.
            base = tl.where(base == float("-inf"), 0.0, base)
            seen = _seen(place, there, at, WINDOW, CHUNK)
            weights = tl.exp2(tl.where(seen, scores, float("-inf")) - base[:, None])
            total += tl.reduce(weights, 0, tl.standard._sum_combine)
    sums = received + prompt * received_stride + place
    tl.store(sums, tl.load(sums, mask=there, other=0) + total, mask=there)
