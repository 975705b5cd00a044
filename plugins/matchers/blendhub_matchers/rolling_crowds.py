"""Text that many runs share: a trie finds the longest stored stretch before any of its places in one walk.

A page is *crowded* once more than a few pages have its tokens; a search compares only the newest of them. So that no
stretch is hidden by newer runs, each place where a stretch that holds a crowded page may end has a leaf in the trie:
the page's own last token, and those of the 31 tokens behind it that are stored. The key of a place is the text that
ends there, read backwards. A run grows at its end, so keys change only where tokens are discarded.

The trie is a crit-bit tree: a node says which bit of the keys below it differs first, and has a child for either value.
Following the bits of a prompt leads to a key that has as much in common with the prompt as any.
"""

import numpy as np

from blendhub_matchers.rolling_hashing import PAGE, inlined
from blendhub_matchers.rolling_pages import FULL, NONE

FEW = 16
"""The most pages of one content that are no crowd."""

REACH = 128
"""The most tokens of a key, or what is certain to be found if that is more. Places with the same ones are told apart by
their numbers."""

NODE_RECORD = np.dtype([("bit", np.int64), ("child", np.int64, (2,))])
"""A child that is not negative is a node, another one the complement of a place: 32 * page + the token in it. Free
nodes hang together by their first children."""

CROWDS_RECORD = np.dtype(
    [
        ("few", np.int64),
        ("reach", np.int64),
        ("leaves", np.int64),
        ("root", np.int64),
        ("free", np.int64),
        ("n_free", np.int64),
    ]
)

TOKEN_BITS = 64  # places in the order of bits for each token: whether there is one, then its own bits


@inlined
def free_new_nodes(nodes, crowds, first, end):
    """Put the nodes ``[first, end)``, which have never been used, into the list of free nodes."""
    for node in range(end - 1, first - 1, -1):
        nodes[node].child[0] = crowds[0].free
        crowds[0].free = node
    crowds[0].n_free += end - first


@inlined
def is_crowded(crowded, page):
    return (crowded[page >> 3] >> np.uint8(page & 7)) & np.uint8(1) != 0


@inlined
def leave_crowd(crowded, run, page):
    """A page of a run that is no longer stored whole is of no crowd."""
    if is_crowded(crowded, page):
        crowded[page >> 3] &= ~(np.uint8(1) << np.uint8(page & 7))
        run.crowded -= 1


@inlined
def _is_led(pages, crowded, page):
    """Whether a crowded page stands right before this one in its run."""
    before = np.int64(pages[page].previous)
    return before != NONE and pages[before].ordinal == pages[page].ordinal - 1 and is_crowded(crowded, before)


@inlined
def join_crowds(index, page):
    """List the new places of a run from a page on, and those of crowds that its new pages make; returns the page that
    there are too few free nodes for, or NONE.
    """
    pages, crowds = index.pages, index.crowds[0]
    while page != NONE:
        if crowds.n_free < (crowds.few + 2) * PAGE:  # those of a page, and of all pages that it makes a crowd with
            return page
        if pages[page].stored == FULL and not is_crowded(index.crowded, page):
            _join_crowd(index, page)
        list_places(index, page, True)
        page = np.int64(pages[page].next)
    return NONE


@inlined
def _join_crowd(index, page):
    """A page joins the older ones with its content if they are a crowd, or makes them one."""
    pages, few = index.pages, index.crowds[0].few
    older = np.int64(pages[page].older)
    if older != NONE and is_crowded(index.crowded, older):
        _mark(pages, index.crowded, index.runs, page)
        return
    count, owner = 0, page
    while owner != NONE and count <= few:
        count += 1
        owner = np.int64(pages[owner].older)
    if count <= few:
        return
    owner = page
    while owner != NONE:
        _mark(pages, index.crowded, index.runs, owner)
        owner = np.int64(pages[owner].older)
    owner = page
    while owner != NONE:
        list_places(index, owner, True)
        if pages[owner].next != NONE:
            list_places(index, np.int64(pages[owner].next), True)
        owner = np.int64(pages[owner].older)


@inlined
def _mark(pages, crowded, runs, page):
    crowded[page >> 3] |= np.uint8(1) << np.uint8(page & 7)
    runs[pages[page].run].crowded += 1


@inlined
def list_places_between(index, page, stop, listed):
    """List the places from a page of a run on, up to the token ``stop`` after the run's start, or take them out."""
    while page != NONE and index.pages[page].ordinal * PAGE < stop:
        list_places(index, page, listed)
        page = np.int64(index.pages[page].next)


@inlined
def list_places(index, page, listed):
    """List the places of a page at which a stretch with a crowded page may end, or take them out."""
    pages, crowds, reach = index.pages, index.crowds[0], index.crowds[0].reach
    own, led = is_crowded(index.crowded, page), _is_led(index.pages, index.crowded, page)
    if not own and not led:
        return
    text = np.empty(reach + PAGE, np.uint32)
    start = text.size - PAGE
    low = _read_before(index.tokens, pages, page, text, start)
    for k in range(PAGE):
        if not (pages[page].stored >> np.uint32(k)) & np.uint32(1):
            return
        text[start + k] = index.tokens[page, k]
        if own if k == PAGE - 1 else led:
            first = max(low, start + k + 1 - reach)
            if listed:
                _insert(index.tokens, pages, index.nodes, crowds, text, start + k, first, page * PAGE + k)
            else:
                _remove(index.nodes, crowds, text, start + k, first, page * PAGE + k)


@inlined
def _read_before(tokens, pages, page, text, at):
    """Copy what is stored right before a page to where ``text[:at]`` ends; returns where that begins."""
    while at > 0:
        before = pages[page].previous
        if before == NONE or pages[before].ordinal != pages[page].ordinal - 1:
            return at
        page = before
        for k in range(PAGE - 1, -1, -1):
            if at == 0 or not (pages[page].stored >> np.uint32(k)) & np.uint32(1):
                return at
            at -= 1
            text[at] = tokens[page, k]
    return at


@inlined
def _value(text, last, low, place, bit, reach):
    """A bit of the key ``text[low : last + 1]``, backwards, of a place."""
    if bit >= reach * TOKEN_BITS:
        return (place >> (bit - reach * TOKEN_BITS)) & 1
    at, kind = last - (bit >> 6), bit & 63
    if at < low:
        return 0
    return 1 if kind == 0 else (np.int64(text[at]) >> (kind - 1)) & 1


@inlined
def _alike(tokens, pages, reach, place, text, last, low):
    """How many tokens up to a place equal those of ``text[low : last + 1]``, at most as many as a key has, and the one
    of the place's run before these; NONE if it has none.
    """
    page, k = place // PAGE, place % PAGE
    length = 0
    while length < reach:
        if k < 0:
            before = np.int64(pages[page].previous)
            if before == NONE or pages[before].ordinal != pages[page].ordinal - 1:
                return length, NONE
            page, k = before, PAGE - 1
            if pages[page].stored == FULL and reach - length >= PAGE and last - length - k >= low:
                different = np.uint32(0)
                for other in range(PAGE):  # many at once
                    different |= tokens[page, other] ^ text[last - length - k + other]
                if different == 0:
                    length, k = length + PAGE, -1
                    continue
        if not (pages[page].stored >> np.uint32(k)) & np.uint32(1):
            return length, NONE
        token = tokens[page, k]
        if last - length < low or token != text[last - length]:
            return length, np.int64(token)
        length, k = length + 1, k - 1
    return length, NONE


@inlined
def _lowest_bit(value):
    bit = 0
    while not (value >> bit) & 1:
        bit += 1
    return bit


@inlined
def _insert(tokens, pages, nodes, crowds, text, last, low, place):
    """Give a place its leaf, if it has none."""
    reach = crowds.reach
    if crowds.leaves == 0:
        crowds.root = ~place
        crowds.leaves = 1
        return
    node = crowds.root
    while node >= 0:
        node = nodes[node].child[_value(text, last, low, place, nodes[node].bit, reach)]
    if node == ~place:
        return
    length, token = _alike(tokens, pages, reach, ~node, text, last, low)
    has_token = last - length >= low
    if length == reach or (not has_token and token == NONE):
        bit = reach * TOKEN_BITS + _lowest_bit(~node ^ place)
    elif not has_token or token == NONE:
        bit = length * TOKEN_BITS
    else:
        bit = length * TOKEN_BITS + 1 + _lowest_bit(token ^ np.int64(text[last - length]))
    parent, turn, node = NONE, 0, crowds.root
    while node >= 0 and nodes[node].bit < bit:
        parent, turn = node, _value(text, last, low, place, nodes[node].bit, reach)
        node = nodes[node].child[turn]
    new = crowds.free
    crowds.free = nodes[new].child[0]
    crowds.n_free -= 1
    crowds.leaves += 1
    side = _value(text, last, low, place, bit, reach)
    nodes[new].bit = bit
    nodes[new].child[side] = ~place
    nodes[new].child[1 - side] = node
    _hang(nodes, crowds, parent, turn, new)


@inlined
def _remove(nodes, crowds, text, last, low, place):
    """Take away a place's leaf, and the node above it."""
    reach = crowds.reach
    crowds.leaves -= 1
    grandparent = parent = NONE
    turn_before = turn = 0
    node = crowds.root
    while node >= 0:
        grandparent, turn_before = parent, turn
        parent, turn = node, _value(text, last, low, place, nodes[node].bit, reach)
        node = nodes[parent].child[turn]
    if parent == NONE:
        return
    _hang(nodes, crowds, grandparent, turn_before, nodes[parent].child[1 - turn])
    nodes[parent].child[0] = crowds.free
    crowds.free = parent
    crowds.n_free += 1


@inlined
def _hang(nodes, crowds, parent, turn, node):
    if parent == NONE:
        crowds.root = node
    else:
        nodes[parent].child[turn] = node


@inlined
def longest_before(tokens, pages, nodes, crowds, prompt, last, places):
    """The length of the longest listed stretch that ends with ``prompt[last]``, as far as keys go, and how many of the
    places where it is stored were written to ``places``: a few, and if keys do not say how long it is, many.
    """
    reach = crowds.reach
    if crowds.leaves == 0:
        return 0, 0
    node = crowds.root
    while node >= 0:
        node = nodes[node].child[_value(prompt, last, 0, 0, nodes[node].bit, reach)]
    length, _ = _alike(tokens, pages, reach, ~node, prompt, last, 0)
    node = crowds.root
    while node >= 0 and nodes[node].bit < length * TOKEN_BITS:
        node = nodes[node].child[_value(prompt, last, 0, 0, nodes[node].bit, reach)]
    # What waits stands behind the places: there is room for it if there are no more than that.
    most = places.size if length == reach else crowds.few
    count, waiting = 0, most
    while True:
        while node >= 0:
            if count < waiting - 1:
                waiting -= 1
                places[waiting] = nodes[node].child[1]
            node = nodes[node].child[0]
        places[count] = ~node
        count += 1
        if waiting == most:
            return length, count
        node = places[waiting]
        waiting += 1
