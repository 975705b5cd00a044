"""The search for the stored tokens of a prompt: windows are hashed, looked up, and extended token by token."""

from collections import namedtuple

import numpy as np
from numba import njit

from blendhub_matchers.rolling_crowds import is_crowded, longest_before
from blendhub_matchers.rolling_hashing import PAGE, hash_of, hash_windows, inlined, power
from blendhub_matchers.rolling_pages import CONTEXT, NONE, extend_before, extend_left, extend_right
from blendhub_matchers.rolling_table import collect_possible, owners

spliced = njit(nogil=True, inline="always")
"""A decorator for functions of an index or a search: passing such tuples to a real function costs more than most do."""

LOOK_BACK = 64  # tokens that a search may look back, for each token of the prompt
MANY = 1024  # places of a crowd that are compared where keys do not say which is the longest
CROWD_COMPARED = 4  # tokens of such places that are compared, for each token of the prompt; then only a few places
CROWD_BASE = 1 << 20  # as many more for each prompt, however short
AT_ONCE = 256  # windows of the prompt that are hashed before they are looked up

COLUMNS = 5
START, END, SHIFT, RUN, BEFORE = range(COLUMNS)
"""Columns of a candidate for a match: its range in the prompt, source position less prompt position, the run's slot,
and how many of the CONTEXT tokens before the range are alike in prompt and run."""

Search = namedtuple("Search", "prompt base leaving tag_mask min_tokens tags possible tried state")
"""What a search is given; the tags of the windows ``[state.first, state.hashed)``; of these windows those that may be
stored, as offsets from ``state.first``; the candidate that is looked at; and how far it is, a STATE_RECORD in an array
of one."""

STATE_RECORD = np.dtype(
    [
        ("first", np.int64),
        ("hashed", np.int64),
        ("value", np.uint64),  # the hash of window ``hashed`` without its last token
        ("count", np.int64),  # of ``possible``
        ("used", np.int64),  # of these
        ("budget", np.int64),  # tokens that may still be looked back
        ("crowded", np.int64),  # 1 once a window had more owners than are compared
    ]
)


@inlined
def find_candidates(index, prompt, base, tag_mask, min_tokens, candidates):
    """Spans of the prompt that are stored, each as long as it can be and overlapping others; returns how many.

    From the first hit on, the owners of the next 32 windows are compared: every stored span of 63 tokens that
    holds the hit has a page among those windows. Kept are the candidate that reaches furthest and, if another begins
    before it, the leftmost. The search goes on where a candidate that overlaps the furthest one's end could begin.
    Of more than a few owners only the newest are compared; then spans of crowded pages are searched by themselves.
    """
    search = Search(
        prompt,
        base,
        power(base, PAGE - 1),
        tag_mask,
        min_tokens,
        np.empty(AT_ONCE, np.uint32),
        np.empty(AT_ONCE, np.int64),
        np.empty(COLUMNS, np.int64),
        np.zeros(1, STATE_RECORD),
    )
    search.state[0].hashed = NONE
    search.state[0].budget = LOOK_BACK * prompt.size
    found = floor = at = 0
    while True:
        at = _next_hit(index, search, at)
        if at == NONE:
            break
        furthest, leftmost = candidates[found], candidates[found + 1]
        _compare_owners(index, search, at, floor, furthest, leftmost)
        if furthest[END] == 0:
            at += PAGE
        else:
            floor = furthest[START]
            at = max(at + 1, furthest[END] - PAGE + 1)
            found += 2 if leftmost[START] < floor else 1
    return _find_crowded(index, search, found, candidates) if search.state[0].crowded else found


@spliced
def _next_hit(index, search, at):
    """The first window from ``at`` on that equals a stored page, with the 31 behind it hashed too; or NONE."""
    state = search.state[0]
    while True:
        window = _hit_among_hashed(index, search, at)
        if window == NONE:
            if not _hash_more(index, search, at):
                return NONE
        elif window > state.first and state.hashed < min(window + PAGE, _windows(search)):
            state.hashed = NONE  # hash from this one on, so that those behind it come along
            state.count = 0
            at = window
        else:
            return window


@spliced
def _hit_among_hashed(index, search, at):
    """The first hashed window from ``at`` on that equals a stored page; or NONE."""
    # Taken out of the tuples once: that takes longer than a look at the table.
    tokens, table, prompt = index.tokens, index.table, search.prompt
    tags, possible, state = search.tags, search.possible, search.state[0]
    first, count = state.first, state.count
    for used in range(state.used, count):
        window = first + possible[used]
        if window >= at and owners(tokens, table, prompt, window, np.uint64(tags[possible[used]])) != NONE:
            state.used = used
            return window
    state.used = count
    return NONE


@spliced
def _hash_more(index, search, at):
    """Hash the next windows that are not hashed yet, from ``at`` on; False if the prompt has no more."""
    state = search.state[0]
    first = max(at, state.hashed)
    if first >= _windows(search):
        return False
    if first > state.hashed:
        state.value = hash_of(search.prompt, first, first + PAGE - 1, search.base)
    state.first = first
    state.hashed = min(first + AT_ONCE, _windows(search))
    tags = search.tags[: state.hashed - first]
    state.value = hash_windows(
        search.prompt, search.base, search.leaving, search.tag_mask, index.homes, first, state.value, tags
    )
    state.count = collect_possible(index.table, index.homes, tags, search.possible)
    state.used = 0
    return True


@spliced
def _windows(search):
    return search.prompt.size - PAGE + 1


@spliced
def _compare_owners(index, search, at, floor, furthest, leftmost):
    """Extend the newest owners of 32 windows, and keep the candidate that reaches furthest and the one that begins
    first.
    """
    state = search.state[0]
    furthest[END] = leftmost[END] = 0
    leftmost[START] = search.prompt.size
    tokens, table, pages, runs = index.tokens, index.table, index.pages, index.runs
    prompt, tags, tried, first = search.prompt, search.tags, search.tried, search.state[0].first
    for window in range(at, min(at + PAGE, _windows(search))):
        page = owners(tokens, table, prompt, window, np.uint64(tags[window - first]))
        for _ in range(index.crowds[0].few):
            if page == NONE:
                break
            record = pages[page]
            shift = runs[record.run].start + record.ordinal * PAGE - window
            if not (_holds(furthest, window, shift, record.run) or _holds(leftmost, window, shift, record.run)):
                tried[SHIFT], tried[RUN] = shift, record.run
                # Looking back over what is covered already makes spans longer, not coverage better, so it has a budget:
                # without one, a prompt that repeats a single token would take quadratic time.
                nearest = floor if state.budget > 0 else max(floor, window - PAGE)
                _extend(index, search, page, window, nearest, prompt.size)
                if tried[END] - tried[START] >= search.min_tokens:
                    if _reaches_further(tried, furthest, runs):
                        furthest[:] = tried
                    if _begins_earlier(tried, leftmost, runs):
                        leftmost[:] = tried
            page = record.older
        if page != NONE:
            state.crowded = 1


@spliced
def _holds(candidate, window, shift, run):
    """Whether the candidate was found by the page before this one: extending that would find it again."""
    return candidate[END] >= window + PAGE and candidate[RUN] == run and candidate[SHIFT] == shift


@spliced
def _extend(index, search, page, window, nearest, stop):
    """How far the prompt and the tried candidate's run agree on both sides of a window, between ``nearest`` and
    ``stop``.
    """
    state, tried = search.state[0], search.tried
    limit = max(nearest - CONTEXT, 0)
    alike = extend_left(index.tokens, index.pages, page, search.prompt, window, limit)
    state.budget -= window - alike
    start = max(alike, nearest)
    run = index.runs[tried[RUN]]
    if alike + tried[SHIFT] == run.start:
        alike = extend_before(run, search.prompt, alike, limit)
    tried[START], tried[BEFORE] = start, min(start - alike, CONTEXT)
    tried[END] = extend_right(index.tokens, index.pages, page, search.prompt, window + PAGE, stop)


@inlined
def _find_crowded(index, search, found, candidates):
    """Add the longest spans that hold a crowded page, each as long as it can be to its left; returns how many
    candidates there are now.

    Behind a span, the search goes on where another one that begins before it may end: each as long as is certain to be
    found has a part before that place that is as long, too.
    """
    state, tried, prompt = search.state[0], search.tried, search.prompt
    places, few, reach = np.empty(MANY, np.int64), index.crowds[0].few, index.crowds[0].reach
    certain = max(search.min_tokens, 2 * PAGE - 1)
    state.budget = CROWD_BASE + CROWD_COMPARED * prompt.size
    may_end = _ends_of_crowded(
        *(index.tokens, index.table, index.homes, index.crowded),
        *(prompt, search.base, search.leaving, search.tag_mask),
    )
    end = prompt.size
    while end > 0:
        length = count = 0
        if may_end[end]:
            tried_places = places if state.budget > 0 else places[:few]
            length, count = longest_before(
                index.tokens, index.pages, index.nodes, index.crowds[0], prompt, end - 1, tried_places
            )
        if length < certain:
            end -= 1
            continue
        candidate = candidates[found]
        candidate[START], candidate[END] = end, 0
        for number in range(count):
            page, k = divmod(places[number], PAGE)
            window = end - 1 - k
            if k < PAGE - 1:  # the crowded page is the one before
                page, window = np.int64(index.pages[page].previous), window - PAGE
            record = index.pages[page]
            tried[SHIFT], tried[RUN] = index.runs[record.run].start + record.ordinal * PAGE - window, record.run
            nearest = end - length if length < reach or state.budget <= 0 else 0
            _extend(index, search, page, window, nearest, prompt.size if state.budget > 0 else end)
            state.budget -= tried[END] - tried[START]
            if _begins_earlier(tried, candidate, index.runs):
                candidate[:] = tried
        found += 1
        end = min(end, candidate[START] + certain) - 1
    return found


@inlined
def _ends_of_crowded(tokens, table, homes, crowded, prompt, base, leaving, tag_mask):
    """Where in the prompt a span whose last whole page is crowded may end."""
    may_end = np.zeros(prompt.size + 1, np.bool_)
    tags = np.empty(prompt.size - PAGE + 1, np.uint32)
    possible = np.empty(tags.size, np.int64)
    hash_windows(prompt, base, leaving, tag_mask, homes, 0, hash_of(prompt, 0, PAGE - 1, base), tags)
    done = 0
    for window in possible[: collect_possible(table, homes, tags, possible)]:
        page = owners(tokens, table, prompt, window, np.uint64(tags[window]))
        if page != NONE and is_crowded(crowded, page):
            stop = min(window + 2 * PAGE, may_end.size)
            may_end[max(done, window + PAGE) : stop] = True
            done = stop
    return may_end


@spliced
def _reaches_further(tried, held, runs):
    """Whether ``tried`` ends after ``held``; if both end alike, the longer one counts, then the better donor."""
    if tried[END] != held[END]:
        return tried[END] > held[END]
    return tried[START] < held[START] or (tried[START] == held[START] and _is_better_donor(tried, held, runs))


@spliced
def _begins_earlier(tried, held, runs):
    """Whether ``tried`` begins before ``held``; if both begin alike, the longer one counts, then the better donor."""
    if tried[START] != held[START]:
        return tried[START] < held[START]
    return tried[END] > held[END] or (tried[END] == held[END] and _is_better_donor(tried, held, runs))


@spliced
def _is_better_donor(tried, held, runs):
    """Whether ``tried``, an owner of the same text as ``held``, has KV that suits the prompt better.

    An owner that is exact wins, then the one with more of the prompt's tokens before the text, then the one
    nearest to the text's position in the prompt, then the one begun last.
    """
    if runs[tried[RUN]].approximate != runs[held[RUN]].approximate:
        return runs[tried[RUN]].approximate < runs[held[RUN]].approximate
    if tried[BEFORE] != held[BEFORE]:
        return tried[BEFORE] > held[BEFORE]
    if abs(tried[SHIFT]) != abs(held[SHIFT]):
        return abs(tried[SHIFT]) < abs(held[SHIFT])
    return runs[tried[RUN]].begun > runs[held[RUN]].begun


@inlined
def choose(candidates, min_tokens, chosen):
    """A disjoint cover of the candidates with as few pieces as possible; returns how many.

    ``candidates`` ascend by start. A border inside an overlap moves left where the piece behind it would
    otherwise be shorter than ``min_tokens``; a piece that stays shorter than that and than a page is dropped. A longer
    one is not: with what the search passes over behind it, more than is certain to be found could stay uncovered.
    """
    count = covered = following = 0
    best = NONE
    while True:
        while following < len(candidates) and candidates[following, START] <= covered:
            if best < 0 or candidates[following, END] > candidates[best, END]:
                best = following
            following += 1
        if best >= 0 and candidates[best, END] > covered:
            border = _border(candidates[best], covered, min_tokens, chosen[:count])
            if border >= 0:
                if count:
                    chosen[count - 1, END] = min(chosen[count - 1, END], border)
                chosen[count] = candidates[best]
                chosen[count, START] = border
                count += 1
                covered = candidates[best, END]
            best = NONE
        elif following < len(candidates):
            covered = candidates[following, START]
        else:
            return count


@inlined
def _border(candidate, covered, min_tokens, chosen):
    """Where the candidate begins as a piece behind those chosen; NONE if a piece would be too short."""
    border = max(covered, candidate[START])
    if candidate[END] - border < min_tokens:
        earlier = max(candidate[END] - min_tokens, candidate[START])
        if not len(chosen) or earlier >= chosen[-1, END] or earlier - chosen[-1, START] >= min_tokens:
            return earlier
        if candidate[END] - border < PAGE:
            return NONE
    return border
