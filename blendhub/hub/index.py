"""The index of stored KV: chunks in runs, runs in namespaces, and the matchers that find their tokens."""

import hashlib
import secrets
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum

import msgspec
import numpy as np

from blendhub.contracts import Matcher, RunKey
from blendhub.errors import InvalidInput
from blendhub.host import PluginHost
from blendhub.layout import Namespace
from blendhub.plan import Match, Span, combine, gaps
from blendhub.tokens import Tokens


class Saved(Enum):
    """Whether the store has a chunk. One that is waiting to be saved is not evicted before."""

    NO = 0
    WAITING = 1
    YES = 2


class Chunk:
    """A stored chunk: in the arena, in the store, or in both."""

    __slots__ = ("content", "offset", "pins", "run", "saved", "span")

    def __init__(self, run: "Run", span: Span, offset: int | None, content: int) -> None:
        self.run = run
        self.span = span
        self.offset = offset
        """Of its slot in the arena; None while the chunk is only in the store."""
        self.pins = 0
        """How many leases read it, and transfers between arena and store use it. A pinned chunk is not evicted."""
        self.saved = Saved.NO
        self.content = content


class Run:
    """Chunks whose KV was computed in one go, at positions that follow each other."""

    __slots__ = ("_hash", "_hashed", "_starts", "chunks", "end", "exact", "id", "index", "key", "tokens")

    def __init__(self, id: int, index: "NamespaceIndex", end: int, exact: bool, key: RunKey | None = None) -> None:
        self.id = id
        self.index = index
        self.end = end
        """The end of the last chunk that was ever published; the run may grow there."""
        self.exact = exact
        self.key = key or RunKey(index.digest, secrets.token_hex(16))
        self.tokens: Tokens | None = None
        """From position 0, kept while the store is to save chunks."""
        self.chunks: dict[int, Chunk] = {}
        self._starts: list[int] = []
        self._hash = hashlib.blake2b(digest_size=16)
        self._hashed = 0

    def continues(self, tokens: Tokens) -> bool:
        """Whether these tokens, from position 0, begin with the tokens that the run was computed from."""
        return hashlib.blake2b(tokens[: self.end].data, digest_size=16).digest() == self._hash.digest()

    def grow(self, tokens: Tokens, end: int) -> None:
        """Extend the run up to a position of these tokens."""
        self._hash.update(tokens[self._hashed : end].data)
        self._hashed = self.end = end

    def add(self, chunk: Chunk) -> None:
        self.chunks[chunk.span.start] = chunk
        insort(self._starts, chunk.span.start)

    def remove(self, chunk: Chunk) -> None:
        del self.chunks[chunk.span.start]
        del self._starts[bisect_right(self._starts, chunk.span.start) - 1]

    def chunks_between(self, start: int, end: int) -> list[Chunk]:
        """The chunks that hold any of the positions ``[start, end)``, ascending."""
        first = max(bisect_right(self._starts, start) - 1, 0)
        chunks = [self.chunks[at] for at in self._starts[first : bisect_left(self._starts, end)]]
        if chunks and chunks[0].span.end <= start:
            del chunks[0]
        return chunks


class ChunkMatch(msgspec.Struct, frozen=True):
    """The part of a match that one chunk holds: positions ``[start, end)`` of the prompt."""

    match: Match
    start: int
    end: int
    chunk: Chunk


class NamespaceIndex:
    """The runs of one namespace, and the matchers that find them."""

    def __init__(self, namespace: Namespace, host: PluginHost) -> None:
        self.namespace = namespace
        self.digest = namespace.digest
        self.base = namespace.base.digest
        """The digest of the engine's namespace, of which this one is a variant."""
        self.runs: dict[int, Run] = {}
        self.by_key: dict[RunKey, Run] = {}
        self.n_chunks = 0
        self._matchers: list[Matcher] = [
            host.create("matcher", choice.name, choice.options) for choice in namespace.matchers
        ]

    def __len__(self) -> int:
        return len(self._matchers[0])

    @property
    def nbytes(self) -> int:
        """The memory that the matchers use."""
        return sum(matcher.nbytes for matcher in self._matchers)

    def chunks(self) -> Iterator[Chunk]:
        return (chunk for run in self.runs.values() for chunk in run.chunks.values())

    def match(self, tokens: Tokens) -> list[Match]:
        """The matches of these tokens. May run on any thread: ``cut_at_chunks`` leaves out evicted chunks."""
        return combine([matcher.match(tokens) for matcher in self._matchers])

    def cut_at_chunks(self, matches: Iterable[Match], skip_prefix: int = 0) -> list[ChunkMatch]:
        """The matches after ``skip_prefix``, cut at chunk borders; chunks that were dropped meanwhile are left out."""
        chunk_matches: list[ChunkMatch] = []
        for match in matches:
            run = self.runs.get(match.run)
            if run is None:
                continue
            shift = match.source_start - match.span.start
            start, end = max(match.span.start, skip_prefix), match.span.end
            if start >= end:
                continue
            for chunk in run.chunks_between(start + shift, end + shift):
                first, last = chunk.span.start - shift, chunk.span.end - shift
                # Not max() and min(): a long prompt has many, and these calls are slow.
                chunk_matches.append(
                    ChunkMatch(match, first if first > start else start, last if last < end else end, chunk)
                )
        return chunk_matches

    def exact_until(self, tokens: Tokens, span: Span) -> int:
        """The position up to which the span is already stored exactly, from its start; at most its end."""
        reached = span.start
        for match in self.match(tokens[: span.end]):
            if match.exact and match.span.start <= reached:
                reached = max(reached, match.span.end)
        return reached

    def publish(self, run: Run, tokens: Tokens, chunks: list[Chunk]) -> None:
        """Append chunks, ascending, to a run, and make them matchable."""
        span = Span(chunks[0].span.start, chunks[-1].span.end)
        missing = list(gaps(span, (chunk.span for chunk in chunks)))
        if run.end != span.start:
            raise InvalidInput(f"run {run.id} ends at {run.end}; it does not grow at {span.start}")
        for matcher in self._matchers:
            matcher.add(run.id, tokens, span, run.exact)
            # Matchers take runs without gaps, but a store may have lost some chunks.
            for gap in missing:
                matcher.discard(run.id, gap)
        run.grow(tokens, span.end)
        self.runs[run.id] = run
        self.by_key[run.key] = run
        for chunk in chunks:
            run.add(chunk)
        self.n_chunks += len(chunks)

    def drop(self, chunk: Chunk) -> None:
        """Forget a chunk that is neither in the arena nor in the store."""
        run = chunk.run
        for matcher in self._matchers:
            matcher.discard(run.id, chunk.span)
        run.remove(chunk)
        chunk.saved = Saved.NO
        self.n_chunks -= 1
        if not run.chunks:
            del self.runs[run.id]
            del self.by_key[run.key]

    def check_integrity(self) -> None:
        chunks = list(self.chunks())
        assert self.n_chunks == len(chunks)
        tokens = sum(len(chunk.span) for chunk in chunks)
        assert all(len(matcher) == tokens for matcher in self._matchers), "a matcher knows other tokens than the index"
        for run in self.runs.values():
            assert run.chunks, "the index keeps a run without chunks"
            assert all(chunk.run is run and run.chunks[start] is chunk for start, chunk in run.chunks.items())


def whole_matches(chunk_matches: Sequence[ChunkMatch]) -> list[Match]:
    """The same parts of matches, no longer cut at chunk borders."""
    whole: list[Match] = []
    first = last = None
    for found in chunk_matches:
        if first and last and (found.match is not first.match or found.start != last.end):
            whole.append(first.match.part(first.start, last.end))
            first = None
        first, last = first or found, found
    if first and last:
        whole.append(first.match.part(first.start, last.end))
    return whole


def content_of(digest: str, tokens: Tokens, span: Span) -> int:
    """A hash of a chunk's tokens, by which an eviction policy recognises a chunk that is stored again."""
    return hash((digest, np.ascontiguousarray(tokens[span.start : span.end]).tobytes()))
