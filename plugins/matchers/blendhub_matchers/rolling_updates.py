"""Storing and forgetting tokens of a run."""

import numpy as np

from blendhub_matchers.rolling_crowds import leave_crowd, list_places_between
from blendhub_matchers.rolling_hashing import PAGE, hash_of, inlined, prefetch, tag_of
from blendhub_matchers.rolling_pages import FULL, NONE, append_page, bits, drop_page, is_stored, page_at
from blendhub_matchers.rolling_table import anchor, fetch_place, release

AHEAD = 16  # pages whose places in the table are fetched before they are needed
REFUSED = -2


@inlined
def store(index, slot, sequence, start, approximate, base, tag_mask):
    """Append ``sequence``, which starts at position ``start``, to a run; REFUSED if the run does not end there.

    There must be free pages and free places in the table. Returns the page from which on the run has to join crowds, or
    NONE.
    """
    tokens, pages, table, homes, counters = index.tokens, index.pages, index.table, index.homes, index.counters
    run = index.runs[slot]
    if run.end != start:
        return REFUSED
    if approximate:
        run.exact_until = min(run.exact_until, start)
        run.approximate = 1
    first_new = run.last
    at = 0
    while at < sequence.size:
        ordinal, first = divmod(start + at - run.start, PAGE)
        page = np.int64(run.last)
        if page == NONE or pages[page].ordinal != ordinal:
            page = np.int64(append_page(pages, counters, run, slot, ordinal))
        count = min(PAGE - first, sequence.size - at)
        for k in range(count):
            tokens[page, first + k] = sequence[at + k]
        at += count
        pages[page].stored |= bits(first, first + count)
        if pages[page].stored == FULL:
            tag = tag_of(hash_of(tokens[page], 0, PAGE, base), tag_mask)
            pages[page].tag = tag
            prefetch(table, np.int64(tag & np.uint64(table.size - 1)))
    # In a second pass, when the places of the table have arrived.
    page = np.int64(run.first if first_new == NONE else first_new)
    first_shared = page if run.crowded else NONE
    while page != NONE:
        if pages[page].stored == FULL and (pages[page].ordinal + 1) * PAGE > start - run.start:
            anchor(tokens, pages, table, homes, counters, page)
            if first_shared == NONE and pages[page].older != NONE:
                first_shared = page
        page = np.int64(pages[page].next)
    run.count += sequence.size
    run.end += sequence.size
    return first_shared


@inlined
def forget(index, slot, start, end):
    """Drop the tokens ``[start, end)`` of a run; returns how many it has left, or -1 if not all of them are stored."""
    pages, table, homes, counters, run = index.pages, index.table, index.homes, index.counters, index.runs[slot]
    at = start - run.start
    stop = end - run.start
    if at < 0 or end > run.end:
        return -1
    page = np.int64(page_at(pages, run, at // PAGE))
    if not is_stored(pages, run, page, at, stop):
        return -1
    was_crowded, before = run.crowded > 0, np.int64(pages[page].previous)
    if was_crowded:
        list_places_between(index, page, stop + index.crowds[0].reach, False)
    ahead = page
    for _ in range(AHEAD):
        ahead = fetch_place(pages, table, ahead)
    while at < stop:
        ahead = fetch_place(pages, table, ahead)
        if pages[page].stored == FULL:
            release(pages, table, homes, counters, page)
            leave_crowd(index.crowded, run, page)
        pages[page].stored &= ~bits(at % PAGE, min(PAGE, at % PAGE + stop - at))
        following = np.int64(pages[page].next)
        if not pages[page].stored:
            drop_page(pages, counters, run, page)
        at += PAGE - at % PAGE
        page = following
    if was_crowded:
        page = np.int64(run.first if before == NONE else before)
        list_places_between(index, page, stop + index.crowds[0].reach, True)
    run.count -= end - start
    return run.count
