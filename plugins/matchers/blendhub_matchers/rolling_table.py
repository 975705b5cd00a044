"""The table that finds a page by the tag of its tokens.

A page that is stored whole is *anchored*: the table leads to it. Pages with equal tokens form a chain of owners, newest
first, and share one entry; entries whose tags collide stand apart, because tokens are compared before
a page joins a chain. A chain therefore stands for one content, whatever the hash.
"""

import numpy as np

from blendhub_matchers.rolling_hashing import inlined, prefetch
from blendhub_matchers.rolling_pages import ENTRIES, NONE, equal

# A table entry is the tag in the upper half and the page + 1 in the lower; 0 is an empty place. Beside each place
# stands a byte, in ``homes``: which of eight classes of tags have an entry whose home is that place. Most windows of
# a prompt are stored nowhere, and the bytes, an eighth of the table's size, say so without a look at the table.


@inlined
def class_of(tag):
    return np.uint8(1) << np.uint8(tag >> np.uint64(29))


@inlined
def entry_of(tag, page):
    return (tag << np.uint64(32)) | np.uint64(page + 1)


@inlined
def page_of(entry):
    return np.int64(entry & np.uint64(0xFFFFFFFF)) - 1


@inlined
def anchor(tokens, pages, table, homes, counters, page):
    """Lead the table to a page; it becomes the newest owner of its content."""
    tag = np.uint64(pages[page].tag)
    last = np.uint64(table.size - 1)
    place = tag & last
    while table[place]:
        entry = table[place]
        head = page_of(entry)
        if entry >> np.uint64(32) == tag and equal(tokens[head], tokens[page]):
            pages[page].older = head
            pages[page].newer = NONE
            pages[head].newer = page
            table[place] = entry_of(tag, page)
            return
        place = (place + np.uint64(1)) & last
    pages[page].older = NONE
    pages[page].newer = NONE
    table[place] = entry_of(tag, page)
    homes[tag & last] |= class_of(tag)
    counters[ENTRIES] += 1


@inlined
def release(pages, table, homes, counters, page):
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
    while table[place] != entry_of(tag, page):
        place = (place + np.uint64(1)) & last
    if older != NONE:
        table[place] = entry_of(tag, older)
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
    if not class_is_here(table, tag):
        homes[tag & last] &= ~class_of(tag)


@inlined
def class_is_here(table, tag):
    """Whether the table has an entry with the tag's home and class."""
    last = np.uint64(table.size - 1)
    place = tag & last
    while table[place]:
        other = table[place] >> np.uint64(32)
        if other & last == tag & last and class_of(other) == class_of(tag):
            return True
        place = (place + np.uint64(1)) & last
    return False


@inlined
def move_entries(old, new, homes):
    """Fill an empty, larger table and its homes."""
    last = np.uint64(new.size - 1)
    for entry in old:
        if entry:
            tag = entry >> np.uint64(32)
            place = tag & last
            homes[place] |= class_of(tag)
            while new[place]:
                place = (place + np.uint64(1)) & last
            new[place] = entry


@inlined
def owners(tokens, table, prompt, at, tag):
    """The newest page that equals ``prompt[at : at + 32]``, or NONE."""
    last = np.uint64(table.size - 1)
    place = tag & last
    while table[place]:
        entry = table[place]
        if entry >> np.uint64(32) == tag:
            page = page_of(entry)
            if equal(tokens[page], prompt[at:]):
                return page
        place = (place + np.uint64(1)) & last
    return NONE


@inlined
def collect_possible(table, homes, tags, possible):
    """Which of the windows with these tags may be stored; returns how many.

    There is no branch on what is found: the processor would often guess it wrong. The places in the table are
    fetched all at once; one after the other, each would be waited for.
    """
    last = np.uint64(homes.size - 1)
    found = np.int64(0)
    for k in range(tags.size):
        tag = np.uint64(tags[k])
        possible[found] = k
        found += np.int64((homes[tag & last] & class_of(tag)) != 0)
    for number in range(found):
        prefetch(table, np.int64(np.uint64(tags[possible[number]]) & last))
    return found


@inlined
def fetch_place(pages, table, page):
    """Start to fetch a page's place of the table; returns the page after it."""
    if page == NONE:
        return page
    prefetch(table, np.int64(np.uint64(pages[page].tag) & np.uint64(table.size - 1)))
    return np.int64(pages[page].next)
