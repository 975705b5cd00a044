"""The rolling-hash matcher: finds stored tokens at any offset, in any order, without separators."""

import mmap
import secrets
import sys
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from blendhub.contracts import Matcher
from blendhub.core.errors import InvalidInput
from blendhub.core.spans import Match, Span, join
from blendhub.core.tokens import Tokens, as_tokens
from blendhub_matchers import rolling_kernels as kernels
from blendhub_matchers.options import RollingHashOptions
from blendhub_matchers.rolling_crowds import CROWDS_RECORD, FEW, NODE_RECORD, REACH
from blendhub_matchers.rolling_hashing import MODULUS, PAGE
from blendhub_matchers.rolling_pages import (
    CONTEXT,
    COUNTERS,
    ENTRIES,
    FREE_PAGE,
    FREE_PAGES,
    NONE,
    PAGE_RECORD,
    RUN_RECORD,
    Index,
)
from blendhub_matchers.rolling_search import COLUMNS, START
from blendhub_matchers.rolling_updates import REFUSED

HUGE_PAGE = 1 << 21


class GrowingArray:
    """A zero-filled array over anonymous memory that the kernel can enlarge without holding it twice.

    Growing invalidates ``view``: a view that is kept across a call to ``grow`` makes that call fail.
    """

    def __init__(self, dtype: npt.DTypeLike, rows: int, width: int = 0) -> None:
        self._dtype = np.dtype(dtype)
        self._width = width
        self._row_bytes = self._dtype.itemsize * max(width, 1)
        size = _whole_pages(rows * self._row_bytes)
        self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._open(rows)

    def __len__(self) -> int:
        return len(self.view)

    @property
    def nbytes(self) -> int:
        return len(self._memory) if len(self.view) else 0  # memory that is not touched is not held

    def grow(self, rows: int) -> None:
        """Make room for at least this many rows; what is there stays."""
        del self.view
        self._memory.resize(_whole_pages(rows * self._row_bytes))
        self._open(rows)

    def _open(self, rows: int) -> None:
        if len(self._memory) >= HUGE_PAGE:
            self._memory.madvise(mmap.MADV_HUGEPAGE)  # random access misses the TLB far less
        flat: npt.NDArray[Any] = np.frombuffer(self._memory, self._dtype, rows * max(self._width, 1))
        self.view = flat.reshape(rows, self._width) if self._width else flat


def _whole_pages(size: int) -> int:
    return -(-max(size, 1) // mmap.PAGESIZE) * mmap.PAGESIZE


HASH_BITS = 32
MAX_POSITION = 2**63 - 1
FIRST_PAGES = 128
FIRST_PLACES = 256
FIRST_RUNS = 16
MORE_NODES = 1024
BOXED_INT = 32
"""Bytes of a Python int: the dictionary of runs holds two of them for each run."""


class RollingHashMatcher(Matcher):
    """Stored tokens lie in pages of 32; a table leads from the hash of a page's tokens to the page.

    A prompt is hashed at every position, and wherever a window equals a stored page the match is
    extended token by token both ways. ``hash_bits`` below 32 makes collisions common, ``few`` below 16 makes crowds so,
    for tests.
    """

    reach = "anywhere"

    def __init__(self, options: RollingHashOptions, hash_bits: int = HASH_BITS, few: int = FEW) -> None:
        self._options = options
        self._few = few
        # Secret, and at least 2**32, so that no two tokens differ by a multiple of the base.
        self._base = np.uint64(2**32 + secrets.randbelow(MODULUS - 2**33))
        self._tag_mask = np.uint64((1 << hash_bits) - 1)
        self._lock = threading.Lock()
        self._clear()
        self._warm_up()

    @property
    def guaranteed_tokens(self) -> int:
        # Any stored span of 63 tokens holds a whole page, wherever the pages begin.
        return max(self._options.min_match_tokens, 2 * PAGE - 1)

    def add(self, run: int, tokens: Tokens, span: Span, exact: bool = True) -> None:
        tokens = as_tokens(tokens)  # kernels are compiled for one layout and mutability; another one would take seconds
        with self._lock:
            self._make_room(len(span) // PAGE + 2)
            slot = self._slots.get(run)
            if slot is None:
                slot = self._open_run(run, tokens[: span.start])
            added = tokens[span.start : span.end]
            page = kernels.store(*self._index, slot, added, span.start, not exact, self._base, self._tag_mask)
            if page == REFUSED:
                end = self._runs.view[slot]["end"]
                raise InvalidInput(f"run {run} grows at its end only, at {end}, not at {span.start}")
            while page != NONE:
                page = kernels.join_crowds(*self._index, page)
                if page != NONE:
                    self._grow_trie()
            self._stored += len(span)

    def discard(self, run: int, span: Span) -> None:
        with self._lock:
            slot = self._slots.get(run)
            left = NONE if slot is None else kernels.forget(*self._index, slot, span.start, span.end)
            if slot is None or left == NONE:
                raise InvalidInput(f"cannot discard {span} of run {run}: not all of it is stored")
            self._stored -= len(span)
            if left == 0:
                del self._slots[run]
                self._free_slots.append(slot)
                if not self._slots:
                    self._clear()

    def match(self, tokens: Tokens) -> list[Match]:
        tokens = as_tokens(tokens)
        if tokens.size < PAGE:
            return []
        candidates = np.empty((2 * tokens.size + 2, COLUMNS), np.int64)
        with self._lock:
            n_found = kernels.find_candidates(
                *self._index,
                tokens,
                self._base,
                self._tag_mask,
                self._options.min_match_tokens,
                candidates,
            )
            return self._matches(candidates[:n_found])

    def __len__(self) -> int:
        return self._stored

    @property
    def nbytes(self) -> int:
        with self._lock:
            arrays = (self._tokens, self._pages, self._table, self._homes, self._runs, self._crowded, self._nodes)
            boxed = sys.getsizeof(self._slots) + 2 * BOXED_INT * len(self._slots)
            return sum(array.nbytes for array in arrays) + boxed + sys.getsizeof(self._free_slots)

    def _matches(self, candidates: np.ndarray) -> list[Match]:
        ordered = candidates[np.argsort(candidates[:, START], kind="stable")]
        chosen = np.empty_like(ordered)
        count = kernels.choose(ordered, self._options.min_match_tokens, chosen)
        matches = []
        for start, end, shift, slot, _ in chosen[:count].tolist():
            run = self._runs.view[slot]
            exact = start == shift == 0 and end <= run["exact_until"]
            matches.append(Match(Span(start, end), int(run["id"]), start + shift, bool(exact)))
        return join(matches)

    def _clear(self) -> None:
        self._stored = self._begun = 0
        self._slots: dict[int, int] = {}
        self._free_slots: list[int] = []
        self._tokens = GrowingArray(np.uint32, FIRST_PAGES, PAGE)
        self._pages = GrowingArray(PAGE_RECORD, FIRST_PAGES)
        self._table = GrowingArray(np.uint64, FIRST_PLACES)
        self._homes = GrowingArray(np.uint8, FIRST_PLACES)
        self._runs = GrowingArray(RUN_RECORD, FIRST_RUNS)
        self._crowded = np.zeros(FIRST_PAGES // 8, np.uint8)  # a bit for each page
        self._nodes = GrowingArray(NODE_RECORD, 0)
        self._crowds = np.array([(self._few, max(REACH, self.guaranteed_tokens), 0, NONE, NONE, 0)], CROWDS_RECORD)
        self._counters = np.zeros(COUNTERS, np.int64)
        self._counters[FREE_PAGE] = NONE
        kernels.free_new_pages(self._pages.view, self._counters, 0, FIRST_PAGES)
        self._capacity = FIRST_PAGES
        self._collect_views()

    def _collect_views(self) -> None:
        """The argument of most kernels; made once, because asking for a view takes longer than using it."""
        self._index = Index(
            self._tokens.view,
            self._pages.view,
            self._table.view,
            self._homes.view,
            self._counters,
            self._runs.view,
            self._crowded,
            self._nodes.view,
            self._crowds,
        )

    def _make_room(self, new_pages: int) -> None:
        """See to it that so many pages can be stored and anchored."""
        missing = new_pages - int(self._counters[FREE_PAGES])
        if missing > 0:
            capacity = self._capacity + max(missing, self._capacity // 64)
            self._grow(self._tokens, capacity)
            self._grow(self._pages, capacity)
            more = np.zeros(capacity // 8 + 1 - len(self._crowded), np.uint8)
            self._crowded = np.concatenate([self._crowded, more])
            self._collect_views()
            kernels.free_new_pages(self._pages.view, self._counters, self._capacity, capacity)
            self._capacity = capacity
        places = len(self._table)
        while self._counters[ENTRIES] + new_pages > places // 4 * 3:
            places *= 2
        if places > len(self._table):
            smaller = self._table
            self._table = GrowingArray(np.uint64, places)
            self._homes = GrowingArray(np.uint8, places)
            kernels.move_entries(smaller.view, self._table.view, self._homes.view)
            self._collect_views()

    def _grow_trie(self) -> None:
        nodes = len(self._nodes)
        more = nodes + max(nodes // 32, MORE_NODES)
        self._grow(self._nodes, more)
        kernels.free_new_nodes(self._nodes.view, self._crowds, nodes, more)

    def _grow(self, array: GrowingArray, rows: int) -> None:
        # An array that is still viewed cannot grow.
        del self._index
        array.grow(rows)
        self._collect_views()

    def _open_run(self, run: int, before: Tokens) -> int:
        """The slot of a new run, whose first token stands behind these."""
        if self._free_slots:
            slot = self._free_slots.pop()
        else:
            slot = len(self._slots)
            if slot == len(self._runs):
                self._grow(self._runs, slot + max(slot // 32, FIRST_RUNS))
        self._slots[run] = slot
        context = np.zeros(CONTEXT, np.uint32)
        last = before[-CONTEXT:]
        context[CONTEXT - last.size :] = last
        self._runs.view[slot] = (run, before.size, before.size, MAX_POSITION, 0, NONE, NONE, self._begun, 0, 0, context)
        self._begun += 1
        return slot

    def _warm_up(self) -> None:
        """Compile every kernel now, so that the first request does not wait for it."""
        tokens = np.arange(3 * PAGE, dtype=np.uint32)
        for run in range(self._few + 1):  # a crowd
            self.add(run, tokens, Span(0, tokens.size))
        kernels.move_entries(self._table.view, np.zeros(FIRST_PLACES, np.uint64), np.zeros(FIRST_PLACES, np.uint8))
        self.match(tokens)
        for run in range(self._few + 1):
            self.discard(run, Span(0, tokens.size))
