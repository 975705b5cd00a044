"""Stored tokens lie in pages of 32; the pages of a run hang together in a list, those in use by no run in another."""

from collections import namedtuple

import numpy as np

from blendhub_matchers.rolling_hashing import PAGE, inlined, prefetch

FULL = np.uint32(0xFFFFFFFF)
NONE = -1
FOLLOWING = 4  # pages of a run that are fetched before a prompt that goes on with it needs them

CONTEXT = 16
"""How many of the tokens before a stored stretch are looked at when its owners are compared."""

PAGE_RECORD = np.dtype(
    [
        ("next", np.int32),  # the page after this one in its run, or in the list of free pages
        ("previous", np.int32),
        ("older", np.int32),  # neighbours in the chain of owners
        ("newer", np.int32),
        ("run", np.int32),  # slot in the array of runs
        ("ordinal", np.int32),  # the page's first token stands at the run's start + 32 * ordinal
        ("stored", np.uint32),  # bit k: the page's token k is stored
        ("tag", np.uint32),  # of a whole page: where the table keeps it
    ]
)
RUN_RECORD = np.dtype(
    [
        ("id", np.int64),
        ("start", np.int64),
        ("end", np.int64),  # where a later add must start
        ("exact_until", np.int64),  # position of the first token that was added as not exact
        ("count", np.int64),  # stored tokens
        ("first", np.int32),
        ("last", np.int32),
        ("begun", np.int64),  # how many runs were begun before
        ("approximate", np.int32),  # 1 once anything was added that is not exact
        ("crowded", np.int32),  # how many of its pages are crowded
        ("before", np.uint32, (CONTEXT,)),  # the tokens before the start, as many as there are, the last one last
    ]
)
COUNTERS = 3
FREE_PAGE, FREE_PAGES, ENTRIES = range(COUNTERS)
"""What ``counters`` holds: the head of the list of free pages, its length, and the table's entries."""

Index = namedtuple("Index", "tokens pages table homes counters runs crowded nodes crowds")
"""The arrays of an index: ``tokens[page, 32]``, ``pages[page]`` of PAGE_RECORD, the table and its homes (see
:mod:`blendhub_matchers.rolling_table`), the counters above, ``runs[slot]`` of RUN_RECORD, a bit for each page that is
crowded, and the nodes of the trie of these and an array of one with the rest of it (see
:mod:`blendhub_matchers.rolling_crowds`)."""


@inlined
def equal(stored, other):
    """Whether a page's tokens equal 32 others. No slices compare: that would allocate."""
    for k in range(PAGE):  # noqa: SIM110  numba compiles no all()
        if stored[k] != other[k]:
            return False
    return True


@inlined
def free_new_pages(pages, counters, first, end):
    """Put the pages ``[first, end)``, which have never been used, into the list of free pages."""
    for page in range(end - 1, first - 1, -1):
        pages[page].next = counters[FREE_PAGE]
        counters[FREE_PAGE] = page
    counters[FREE_PAGES] += end - first


@inlined
def append_page(pages, counters, run, slot, ordinal):
    page = counters[FREE_PAGE]
    counters[FREE_PAGE] = pages[page].next
    counters[FREE_PAGES] -= 1
    record = pages[page]
    record.next = NONE
    record.previous = run.last
    record.run = slot
    record.ordinal = ordinal
    record.stored = 0
    if run.last == NONE:
        run.first = page
    else:
        pages[run.last].next = page
    run.last = page
    return page


@inlined
def drop_page(pages, counters, run, page):
    before, after = pages[page].previous, pages[page].next
    if before == NONE:
        run.first = after
    else:
        pages[before].next = after
    if after == NONE:
        run.last = before
    else:
        pages[after].previous = before
    pages[page].next = counters[FREE_PAGE]
    counters[FREE_PAGE] = page
    counters[FREE_PAGES] += 1


@inlined
def bits(first, stop):
    """A mask with the bits ``[first, stop)`` set."""
    return np.uint32((np.uint64(1) << np.uint64(stop)) - (np.uint64(1) << np.uint64(first)))


@inlined
def page_at(pages, run, ordinal):
    """The run's page with this ordinal or the next larger one; NONE behind the last."""
    if run.first == NONE or ordinal > pages[run.last].ordinal:
        return NONE
    if ordinal - pages[run.first].ordinal <= pages[run.last].ordinal - ordinal:
        page = run.first
        while pages[page].ordinal < ordinal:
            page = pages[page].next
        return page
    page = run.last
    while pages[page].previous != NONE and pages[pages[page].previous].ordinal >= ordinal:
        page = pages[page].previous
    return page


@inlined
def is_stored(pages, run, page, at, stop):
    """Whether the tokens ``[at, stop)`` after a run's start are stored; the page is where they begin."""
    while at < stop:
        if page == NONE or pages[page].ordinal != at // PAGE:
            return False
        wanted = bits(at % PAGE, min(PAGE, at % PAGE + stop - at))
        if pages[page].stored & wanted != wanted:
            return False
        at += PAGE - at % PAGE
        page = pages[page].next
    return True


@inlined
def extend_before(run, prompt, at, floor):
    """``prompt[at:]`` begins as the run does; how far back, at most to ``floor``, is what stood before it alike too?"""
    most = min(CONTEXT, run.start, at - floor)
    for k in range(most):
        if run.before[CONTEXT - 1 - k] != prompt[at - 1 - k]:
            return at - k
    return at - most


@inlined
def extend_right(tokens, pages, page, prompt, at, stop):
    """``prompt[:at]`` ends as the page does; how far, at most to ``stop``, do both go on alike?"""
    while at < stop:
        following = pages[page].next
        if following == NONE or pages[following].ordinal != pages[page].ordinal + 1:
            return at
        page = following
        # Mostly the run's next pages, since runs are stored in one go; no harm is done where they are not.
        prefetch(pages, page + FOLLOWING)
        prefetch(tokens, page + FOLLOWING)
        stored = pages[page].stored
        for k in range(min(PAGE, stop - at)):
            if not (stored >> np.uint32(k)) & np.uint32(1) or tokens[page, k] != prompt[at]:
                return at
            at += 1
    return at


@inlined
def extend_left(tokens, pages, page, prompt, at, floor):
    """``prompt[at:]`` begins as the page does; how far back, at most to ``floor``, are both alike?"""
    while at > floor:
        before = pages[page].previous
        if before == NONE or pages[before].ordinal != pages[page].ordinal - 1:
            return at
        page = before
        stored = pages[page].stored
        for k in range(PAGE - 1, -1, -1):
            if at == floor or not (stored >> np.uint32(k)) & np.uint32(1) or tokens[page, k] != prompt[at - 1]:
                return at
            at -= 1
    return at
