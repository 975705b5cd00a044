"""The catalogue of a store: its entries, their sizes, and which to drop when it is full. No I/O."""

from collections import OrderedDict
from collections.abc import Iterator
from typing import TypeAlias

from blendhub.contracts import RunKey
from blendhub.core.errors import StoreFailed
from blendhub.core.spans import Span

Entry: TypeAlias = tuple[RunKey, Span | None]
"""A chunk of a run; with None as span, the run's tokens and description."""


class EntryVersion:
    """One version of an entry. Replacing the entry makes a new object, so that versions can be compared by identity."""

    __slots__ = ("nbytes",)

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


class _Run:
    __slots__ = ("chunks", "n_tokens", "version")

    def __init__(self) -> None:
        self.version = EntryVersion(0)
        self.n_tokens = 0
        self.chunks: dict[Span, EntryVersion] = {}


class Catalogue:
    """Runs and their chunks, in the order of their last use.

    A run without chunks is in that order itself; a run with chunks is removed with its last chunk.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.nbytes = 0
        self._runs: dict[RunKey, _Run] = {}
        self._longest_unused_first: OrderedDict[Entry, None] = OrderedDict()

    def __iter__(self) -> Iterator[RunKey]:
        return iter(self._runs)

    def n_tokens(self, key: RunKey) -> int | None:
        """How many tokens a run has; None if the run is not stored."""
        run = self._runs.get(key)
        return run.n_tokens if run else None

    def chunks(self, key: RunKey) -> list[Span]:
        run = self._runs.get(key)
        return sorted(run.chunks) if run else []

    def version(self, entry: Entry) -> EntryVersion | None:
        key, span = entry
        run = self._runs.get(key)
        if run is None:
            return None
        return run.version if span is None else run.chunks.get(span)

    def put_run(self, key: RunKey, nbytes: int, n_tokens: int) -> None:
        run = self._runs.setdefault(key, _Run())
        self.nbytes += nbytes - run.version.nbytes
        run.version = EntryVersion(nbytes)
        run.n_tokens = n_tokens
        if not run.chunks:
            self.touch((key, None))

    def put_chunk(self, key: RunKey, span: Span, nbytes: int) -> None:
        run = self._runs[key]
        earlier = run.chunks.get(span)
        self.nbytes += nbytes - (earlier.nbytes if earlier else 0)
        run.chunks[span] = EntryVersion(nbytes)
        self._longest_unused_first.pop((key, None), None)
        self.touch((key, span))

    def longest_unused(self) -> Entry:
        return next(iter(self._longest_unused_first))

    def touch(self, entry: Entry) -> None:
        self._longest_unused_first[entry] = None
        self._longest_unused_first.move_to_end(entry)

    def discard(self, entry: Entry, *, keep: RunKey | None = None) -> list[Entry]:
        """Remove an entry and the entries that depend on it; returns all removed entries.

        The run ``keep`` stays even when its last chunk is removed.
        """
        key, span = entry
        run = self._runs.get(key)
        if run is None or (span is not None and span not in run.chunks):
            return []
        gone: list[Entry] = []
        for lost in [span] if span is not None else list(run.chunks):
            self.nbytes -= run.chunks.pop(lost).nbytes
            del self._longest_unused_first[key, lost]
            gone.append((key, lost))
        if not run.chunks and key == keep:
            self.touch((key, None))
        elif not run.chunks:
            self.nbytes -= run.version.nbytes
            self._longest_unused_first.pop((key, None), None)
            del self._runs[key]
            gone.append((key, None))
        return gone

    def victims(self, arriving: Entry, nbytes: int) -> list[Entry]:
        """The entries to discard so that an entry of this size fits and its own run stays; changes nothing."""
        replaced = self.version(arriving)
        excess = self.nbytes + nbytes - (replaced.nbytes if replaced else 0) - self.capacity
        chosen: list[Entry] = []
        chunks_left: dict[RunKey, int] = {}
        for entry in self._longest_unused_first:
            if excess <= 0:
                break
            key, span = entry
            if entry == arriving or (span is None and key == arriving[0]):
                continue
            run = self._runs[key]
            if span is not None:
                chunks_left[key] = chunks_left.get(key, len(run.chunks)) - 1
                excess -= run.chunks[span].nbytes
            if not chunks_left.get(key) and key != arriving[0]:
                excess -= run.version.nbytes
            chosen.append(entry)
        if excess > 0:
            raise StoreFailed(
                f"{nbytes} bytes and the rest of their run do not fit in a store of {self.capacity} bytes, "
                f"even with all other entries dropped; set a larger capacity_gib"
            )
        return chosen
