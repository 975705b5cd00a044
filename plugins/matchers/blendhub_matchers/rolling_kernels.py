"""Compiled kernels of the rolling-hash index.

They all work on three arrays, so that a call costs little: ``tokens[page, 32]`` holds the stored tokens in
pages, ``pages[page]`` says how the pages hang together, ``table`` finds a page by the hash of its tokens.

A page that is stored whole is *anchored*: the table leads to it. Pages with equal tokens form a chain of owners, newest
first, and share one entry; entries whose tags collide stand apart, because tokens are compared before
a page joins a chain. A chain therefore stands for one content, whatever the hash.
"""

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

PAGE = 32
FULL = np.uint32(0xFFFFFFFF)
NONE = -1
LOOK_BACK = 64  # tokens that a search may look back, for each token of the prompt
AT_ONCE = 256  # windows of the prompt that are hashed before they are looked up
AHEAD = 16  # pages whose places in the table are fetched before they are needed
FOLLOWING = 4  # the same for the pages of a run that a prompt goes on with
MODULUS = (1 << 61) - 1

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
    ]
)
COUNTERS = 3
FREE_PAGE, FREE_PAGES, ENTRIES = range(COUNTERS)
"""What ``counters`` holds: the head of the list of free pages, its length, and the table's entries."""

_compiled = njit(nogil=True, cache=True)


@intrinsic
def _multiply_fold(typing_context, a, b):  # type: ignore[no-untyped-def]
    """``a * b`` modulo 2**61 - 1, not fully reduced: below 2**62 for factors below 2**61."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        wide, word = ir.IntType(128), ir.IntType(64)
        product = builder.mul(*(builder.zext(one, wide) for one in arguments))
        low = builder.trunc(builder.and_(product, wide(MODULUS)), word)
        return builder.add(low, builder.trunc(builder.lshr(product, wide(61)), word))

    return types.uint64(types.uint64, types.uint64), generate


@intrinsic
def _prefetch(typing_context, array, place):  # type: ignore[no-untyped-def]
    """Fetch a place of an array into the cache, so that its memory need not be waited for later."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        kind, where = signature.args[0], arguments[1]
        indices = [where] + [where.type(0)] * (kind.ndim - 1)
        data = context.make_array(kind)(context, builder, arguments[0])
        address = cgutils.get_item_pointer(context, builder, kind, data, indices)
        byte, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
        takes = ir.FunctionType(ir.VoidType(), [byte, flag, flag, flag])
        function = cgutils.get_or_insert_function(builder.module, takes, "llvm.prefetch.p0")
        builder.call(function, [builder.bitcast(address, byte), flag(0), flag(3), flag(1)])  # to read, often, data
        return context.get_dummy_value()

    return types.void(array, place), generate


@_compiled
def _reduce(value):
    value = (value & np.uint64(MODULUS)) + (value >> np.uint64(61))
    return value - np.uint64(MODULUS) if value >= np.uint64(MODULUS) else value


@_compiled
def _tag(value, tag_mask):
    """32 well-mixed bits of a window's hash."""
    return ((value * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32)) & tag_mask


@_compiled
def _power(base, exponent):
    result = np.uint64(1)
    for _ in range(exponent):
        result = _reduce(_multiply_fold(result, base))
    return result


@_compiled
def _appended(value, token, base):
    """The hash of a sequence with one more token, not reduced. A token counts one more, so that leading zeros do."""
    return _multiply_fold(value, base) + np.uint64(token) + np.uint64(1)


@_compiled
def _hash(tokens, start, end, base):
    value = np.uint64(0)
    for at in range(start, end):
        value = _reduce(_appended(value, tokens[at], base))
    return value


@_compiled
def _equal(stored, other):
    """Whether a page's tokens equal 32 others. No slices compare: that would allocate."""
    for k in range(PAGE):  # noqa: SIM110  numba compiles no all()
        if stored[k] != other[k]:
            return False
    return True


# A table entry is the tag in the upper half and the page + 1 in the lower; 0 is an empty place. Beside each place
# stands a byte, in ``homes``: which of eight classes of tags have an entry whose home is that place. Most windows of
# a prompt are stored nowhere, and the bytes, an eighth of the table's size, say so without a look at the table.


@_compiled
def _class_of(tag):
    return np.uint8(1) << np.uint8(tag >> np.uint64(29))


@_compiled
def _entry(tag, page):
    return (tag << np.uint64(32)) | np.uint64(page + 1)


@_compiled
def _page_of(entry):
    return np.int64(entry & np.uint64(0xFFFFFFFF)) - 1


@_compiled
def _anchor(tokens, pages, table, homes, counters, page):
    """Lead the table to a page; it becomes the newest owner of its content."""
    tag = np.uint64(pages[page].tag)
    last = np.uint64(table.size - 1)
    place = tag & last
    while table[place]:
        entry = table[place]
        head = _page_of(entry)
        if entry >> np.uint64(32) == tag and _equal(tokens[head], tokens[page]):
            pages[page].older = head
            pages[page].newer = NONE
            pages[head].newer = page
            table[place] = _entry(tag, page)
            return
        place = (place + np.uint64(1)) & last
    pages[page].older = NONE
    pages[page].newer = NONE
    table[place] = _entry(tag, page)
    homes[tag & last] |= _class_of(tag)
    counters[ENTRIES] += 1


@_compiled
def _release(pages, table, homes, counters, page):
    """Take a page out of its chain, and the chain out of the table with its last page."""
    tag = np.uint64(pages[page].tag)
    older, newer = pages[page].older, pages[page].newer
    if older != NONE:
        pages[older].newer = newer
    if newer != NONE:
        pages[newer].older = older
        return
    last = np.uint64(table.size - 1)
    place = tag & last
    while table[place] != _entry(tag, page):
        place = (place + np.uint64(1)) & last
    if older != NONE:
        table[place] = _entry(tag, older)
        return
    counters[ENTRIES] -= 1
    # Close the gap: an entry moves back unless that would put it before its home.
    follower = place
    while True:
        follower = (follower + np.uint64(1)) & last
        entry = table[follower]
        if not entry:
            break
        home = (entry >> np.uint64(32)) & last
        if ((follower - home) & last) >= ((follower - place) & last):
            table[place] = entry
            place = follower
    table[place] = 0
    if not _class_is_here(table, tag):
        homes[tag & last] &= ~_class_of(tag)


@_compiled
def _class_is_here(table, tag):
    """Whether the table has an entry with the tag's home and class."""
    last = np.uint64(table.size - 1)
    place = tag & last
    while table[place]:
        other = table[place] >> np.uint64(32)
        if other & last == tag & last and _class_of(other) == _class_of(tag):
            return True
        place = (place + np.uint64(1)) & last
    return False


@_compiled
def move_entries(old, new, homes):
    """Fill an empty, larger table and its homes."""
    last = np.uint64(new.size - 1)
    for entry in old:
        if entry:
            tag = entry >> np.uint64(32)
            place = tag & last
            homes[place] |= _class_of(tag)
            while new[place]:
                place = (place + np.uint64(1)) & last
            new[place] = entry


@_compiled
def free_new_pages(pages, counters, first, end):
    """Put the pages ``[first, end)``, which have never been used, into the list of free pages."""
    for page in range(end - 1, first - 1, -1):
        pages[page].next = counters[FREE_PAGE]
        counters[FREE_PAGE] = page
    counters[FREE_PAGES] += end - first


@_compiled
def _append_page(pages, counters, run, slot, ordinal):
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


@_compiled
def _bits(first, stop):
    """A mask with the bits ``[first, stop)`` set."""
    return np.uint32((np.uint64(1) << np.uint64(stop)) - (np.uint64(1) << np.uint64(first)))


@_compiled
def store(tokens, pages, table, homes, counters, runs, slot, sequence, start, exact, base, tag_mask):
    """Append ``sequence``, which starts at position ``start``, to a run; False if the run does not end there.

    There must be free pages and free places in the table.
    """
    run = runs[slot]
    if run.end != start:
        return False
    if not exact:
        run.exact_until = min(run.exact_until, start)
    first_new = run.last
    at = 0
    while at < sequence.size:
        ordinal, first = divmod(start + at - run.start, PAGE)
        page = np.int64(run.last)
        if page == NONE or pages[page].ordinal != ordinal:
            page = np.int64(_append_page(pages, counters, run, slot, ordinal))
        count = min(PAGE - first, sequence.size - at)
        for k in range(count):
            tokens[page, first + k] = sequence[at + k]
        at += count
        pages[page].stored |= _bits(first, first + count)
        if pages[page].stored == FULL:
            tag = _tag(_hash(tokens[page], 0, PAGE, base), tag_mask)
            pages[page].tag = tag
            _prefetch(table, np.int64(tag & np.uint64(table.size - 1)))
    # In a second pass, when the places of the table have arrived.
    page = run.first if first_new == NONE else first_new
    while page != NONE:
        if pages[page].stored == FULL and (pages[page].ordinal + 1) * PAGE > start - run.start:
            _anchor(tokens, pages, table, homes, counters, page)
        page = pages[page].next
    run.count += sequence.size
    run.end += sequence.size
    return True


@_compiled
def _page_at(pages, run, ordinal):
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


@_compiled
def _is_stored(pages, run, page, at, stop):
    """Whether the tokens ``[at, stop)`` after a run's start are stored; the page is where they begin."""
    while at < stop:
        if page == NONE or pages[page].ordinal != at // PAGE:
            return False
        wanted = _bits(at % PAGE, min(PAGE, at % PAGE + stop - at))
        if pages[page].stored & wanted != wanted:
            return False
        at += PAGE - at % PAGE
        page = pages[page].next
    return True


@_compiled
def forget(pages, table, homes, counters, runs, slot, start, end):
    """Drop the tokens ``[start, end)`` of a run; returns how many it has left, or -1 if not all of them are stored."""
    run = runs[slot]
    at = start - run.start
    stop = end - run.start
    if at < 0 or end > run.end:
        return -1
    page = np.int64(_page_at(pages, run, at // PAGE))
    if not _is_stored(pages, run, page, at, stop):
        return -1
    ahead = page
    for _ in range(AHEAD):
        ahead = _fetch_place(pages, table, ahead)
    while at < stop:
        ahead = _fetch_place(pages, table, ahead)
        if pages[page].stored == FULL:
            _release(pages, table, homes, counters, page)
        pages[page].stored &= ~_bits(at % PAGE, min(PAGE, at % PAGE + stop - at))
        following = np.int64(pages[page].next)
        if not pages[page].stored:
            _drop_page(pages, counters, run, page)
        at += PAGE - at % PAGE
        page = following
    run.count -= end - start
    return run.count


@_compiled
def _fetch_place(pages, table, page):
    """Start to fetch a page's place of the table; returns the page after it."""
    if page == NONE:
        return page
    _prefetch(table, np.int64(np.uint64(pages[page].tag) & np.uint64(table.size - 1)))
    return np.int64(pages[page].next)


@_compiled
def _drop_page(pages, counters, run, page):
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


@_compiled
def _extend_right(tokens, pages, page, prompt, at):
    """``prompt[:at]`` ends as the page does; how far do both go on alike?"""
    while at < prompt.size:
        following = pages[page].next
        if following == NONE or pages[following].ordinal != pages[page].ordinal + 1:
            return at
        page = following
        # Mostly the run's next pages, since runs are stored in one go; no harm is done where they are not.
        _prefetch(pages, page + FOLLOWING)
        _prefetch(tokens, page + FOLLOWING)
        stored = pages[page].stored
        for k in range(min(PAGE, prompt.size - at)):
            if not (stored >> np.uint32(k)) & np.uint32(1) or tokens[page, k] != prompt[at]:
                return at
            at += 1
    return at


@_compiled
def _extend_left(tokens, pages, page, prompt, at, floor):
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


@_compiled
def _owners(tokens, table, prompt, at, tag):
    """The newest page that equals ``prompt[at : at + 32]``, or NONE."""
    last = np.uint64(table.size - 1)
    place = tag & last
    while table[place]:
        entry = table[place]
        if entry >> np.uint64(32) == tag:
            page = _page_of(entry)
            if _equal(tokens[page], prompt[at:]):
                return page
        place = (place + np.uint64(1)) & last
    return NONE


@_compiled
def _hash_windows(prompt, base, leaving, tag_mask, homes, first, value, tags):
    """The tags of the windows from ``first`` on, as many as ``tags`` has places for.

    ``value`` is the hash of the first window without its last token; returned is that of the window behind the last.
    """
    last = np.uint64(homes.size - 1)
    for k in range(tags.size):
        value = _appended(value, prompt[first + k + PAGE - 1], base)
        tag = _tag(_reduce(value), tag_mask)
        tags[k] = tag
        # The next hash waits for this one; memory that arrives meanwhile costs nothing.
        _prefetch(homes, np.int64(tag & last))
        gone = _reduce(_multiply_fold(np.uint64(prompt[first + k]) + np.uint64(1), leaving))
        value = _reduce(value + np.uint64(MODULUS) - gone)
    return value


@_compiled
def _collect_possible(table, homes, tags, possible):
    """Which of the windows with these tags may be stored; returns how many.

    There is no branch on what is found: the processor would often guess it wrong. The places in the table are
    fetched all at once; one after the other, each would be waited for.
    """
    last = np.uint64(homes.size - 1)
    found = 0
    for k in range(tags.size):
        tag = np.uint64(tags[k])
        possible[found] = k
        found += np.int64((homes[tag & last] & _class_of(tag)) != 0)
    for one in range(found):
        _prefetch(table, np.int64(np.uint64(tags[possible[one]]) & last))
    return found


START, END, SHIFT, RUN = range(4)
"""Columns of a stretch: its range in the prompt, source position less prompt position, and the run's slot."""


@_compiled
def find_stretches(tokens, pages, table, homes, runs, prompt, base, tag_mask, max_candidates, min_tokens, stretches):
    """Stretches of the prompt that are stored, each as long as it can be; returns how many.

    From the first hit on, all owners of the next 32 windows are compared: every stored stretch of 63 tokens that
    holds the hit has a page among those windows. Kept are the stretch that reaches furthest and, if another begins
    before it, the leftmost. The search goes on where a stretch that overlaps the furthest one's end could begin.

    Looking back over what is covered already makes spans longer, not coverage better, so it has a budget: without
    one, a prompt that repeats a single token would take quadratic time.
    """
    found = 0
    floor = 0
    budget = LOOK_BACK * prompt.size
    windows = prompt.size - PAGE + 1
    tags = np.empty(AT_ONCE, np.uint32)
    possible = np.empty(AT_ONCE, np.int64)
    leaving = _power(base, PAGE - 1)
    value = _hash(prompt, 0, PAGE - 1, base)
    at = first = reached = 0
    count = used = 0
    while True:
        while used < count and first + possible[used] < at:
            used += 1
        if used == count:
            first = max(at, reached)
            if first >= windows:
                return found
            if first > reached:
                value = _hash(prompt, first, first + PAGE - 1, base)
            reached = min(first + AT_ONCE, windows)
            hashed = tags[: reached - first]
            value = _hash_windows(prompt, base, leaving, tag_mask, homes, first, value, hashed)
            count = _collect_possible(table, homes, hashed, possible)
            used = 0
            continue
        at = first + possible[used]
        if _owners(tokens, table, prompt, at, np.uint64(tags[at - first])) == NONE:
            at += 1
            continue
        if first < at and reached < min(at + PAGE, windows):
            # The windows behind it must be hashed too: once more, from here on.
            count = used = reached = 0
            continue
        far = stretches[found]
        left = stretches[found + 1]
        far[END] = 0
        left[START] = prompt.size
        for window in range(at, min(at + PAGE, windows)):
            page = _owners(tokens, table, prompt, window, np.uint64(tags[window - first]))
            tried = 0
            while page != NONE and tried < max_candidates:
                tried += 1
                record = pages[page]
                shift = runs[record.run].start + record.ordinal * PAGE - window
                seen = (far[END] >= window + PAGE and far[RUN] == record.run and far[SHIFT] == shift) or (
                    left[START] < prompt.size
                    and left[END] >= window + PAGE
                    and left[RUN] == record.run
                    and left[SHIFT] == shift
                )
                if not seen:
                    nearest = floor if budget > 0 else max(floor, window - PAGE)
                    start = _extend_left(tokens, pages, page, prompt, window, nearest)
                    budget -= window - start
                    end = _extend_right(tokens, pages, page, prompt, window + PAGE)
                    if end - start >= min_tokens:
                        if end > far[END] or (
                            end == far[END] and (start < far[START] or (start == far[START] and shift == 0))
                        ):
                            far[START], far[END], far[SHIFT], far[RUN] = start, end, shift, record.run
                        if start < left[START]:
                            left[START], left[END], left[SHIFT], left[RUN] = start, end, shift, record.run
                page = record.older
        if far[END] == 0:
            at += PAGE
            continue
        floor = far[START]
        at = max(at + 1, far[END] - PAGE + 1)
        found += 2 if left[START] < far[START] else 1


@_compiled
def choose(stretches, min_tokens, chosen):
    """A disjoint cover of the stretches with as few pieces as possible; returns how many.

    ``stretches`` ascend by start. A border inside an overlap moves left where the piece behind it would
    otherwise be shorter than ``min_tokens``; a piece that stays too short is dropped.
    """
    count = 0
    covered = 0
    following = 0
    best = -1
    while True:
        while following < len(stretches) and stretches[following, START] <= covered:
            if best < 0 or stretches[following, END] > stretches[best, END]:
                best = following
            following += 1
        if best >= 0 and stretches[best, END] > covered:
            border = max(covered, stretches[best, START])
            if stretches[best, END] - border < min_tokens:
                border = max(stretches[best, END] - min_tokens, stretches[best, START])
                if count and border < chosen[count - 1, END]:
                    if border - chosen[count - 1, START] < min_tokens:
                        border = -1
                    else:
                        chosen[count - 1, END] = border
            if border >= 0:
                chosen[count] = stretches[best]
                chosen[count, START] = border
                count += 1
                covered = stretches[best, END]
            best = -1
        elif following < len(stretches):
            covered = stretches[following, START]
        else:
            return count
