"""The index of stored KV: chunks in runs, runs in namespaces, and the matchers that find their tokens."""

import hashlib
import logging
import secrets
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np

from blendhub.contracts import Matcher, RunKey
from blendhub.core.errors import InvalidInput
from blendhub.core.layout import MIN_SAVED_TOKENS, Namespace
from blendhub.core.spans import NOWHERE, Match, Span, combine, gaps, join_spans, touching
from blendhub.core.tokens import Tokens
from blendhub.framework.host import PluginHost
from blendhub.hub.index.match_queues import MatchQueue, MatchThreads
from blendhub.hub.index.settled import SettledMatches
from blendhub.hub.limits import MOST_CHUNKS
from blendhub.outcome.reasons import NotReused, Why

log = logging.getLogger(__name__)


class Chunk:
    """A stored chunk: in the arena, in the store, or in both."""

    __slots__ = ("content", "in_store", "offset", "pins", "run", "span")

    def __init__(self, run: "Run", span: Span, offset: int | None, content: int) -> None:
        self.run = run
        self.span = span
        self.offset = offset
        """The offset of the chunk's slot in the arena; None while the chunk is only in the store."""
        self.pins = 0
        """The number of leases and transfers that use the chunk. A pinned chunk is not evicted."""
        self.in_store = False
        self.content = content


class Origin(NamedTuple):
    """How the KV of a run came about."""

    exact: bool = True
    """Whether nothing before or in the run was blended."""
    movable_from: int = 0
    """The position from which on the KV may be moved. What lies before, such as KV that was computed with too little
    context, is of use behind its whole prefix only; ``NOWHERE`` for blended KV, and for KV of requests that may not
    donate."""
    ratio: float = 0.0
    """The share that was recomputed when inexact KV, or KV before it, was blended."""

    @property
    def is_movable(self) -> bool:
        return self.movable_from < NOWHERE


class Run:
    """Chunks whose KV was computed in one go, at positions that follow each other."""

    __slots__ = (
        *("_hash", "_hashed", "_starts", "chunks", "end", "foreign"),
        *("id", "index", "key", "listed", "origin", "tokens"),
    )

    def __init__(
        self,
        id: int,
        index: "NamespaceIndex",
        end: int,
        origin: Origin,
        key: RunKey | None = None,
        *,
        foreign: bool = False,
    ) -> None:
        self.id = id
        self.index = index
        self.end = end
        """The end of the last chunk that was ever published, or of the tokens that the store may have; the run may
        grow there."""
        self.origin = origin
        self.key = key or RunKey(index.digest, secrets.token_hex(16))
        self.foreign = foreign
        """Whether another hub computed the run. Only that hub, which named the run, lets it grow."""
        self.listed = 0
        """The last snapshot of a shared store that had chunks of it, or after which some were saved."""
        self.tokens: Tokens | None = None
        """The run's tokens from position 0, if the store takes its chunks when a prompt asks for them again."""
        self.chunks: dict[int, Chunk] = {}
        self._starts: list[int] = []
        self._hash = hashlib.blake2b(digest_size=16)
        self._hashed = 0

    def continues(self, tokens: Tokens, at: int) -> bool:
        """Whether the run ends at this position and was computed from these tokens. Part of a queue's work."""
        if self._hashed != at:
            return False
        return hashlib.blake2b(tokens[:at].data, digest_size=16).digest() == self._hash.digest()

    def note_tokens(self, tokens: Tokens, end: int) -> None:
        """Note that the run now consists of these tokens up to a position. Part of a queue's work."""
        self._hash.update(tokens[self._hashed : end].data)
        self._hashed = end

    def add(self, chunk: Chunk) -> None:
        self.chunks[chunk.span.start] = chunk
        insort(self._starts, chunk.span.start)

    def remove(self, chunk: Chunk) -> None:
        del self.chunks[chunk.span.start]
        del self._starts[bisect_right(self._starts, chunk.span.start) - 1]

    def chunks_between(self, start: int, end: int, most: int) -> list[Chunk]:
        """The chunks that hold any of the positions ``[start, end)``, ascending. If there are more than ``most``, it
        may leave out those behind the first ``most``.
        """
        first = max(bisect_right(self._starts, start) - 1, 0)
        last = min(bisect_left(self._starts, end), first + most + 1)
        chunks = [self.chunks[at] for at in self._starts[first:last]]
        if chunks and chunks[0].span.end <= start:
            del chunks[0]
        return chunks


class ChunkMatch(msgspec.Struct, frozen=True):
    """The part of a match that one chunk holds: positions ``[start, end)`` of the prompt."""

    match: Match
    start: int
    end: int
    chunk: Chunk

    @property
    def slot_token(self) -> int:
        """The row in the chunk of the first token."""
        return self.match.source_start + self.start - self.match.span.start - self.chunk.span.start


class StoredText(NamedTuple):
    """What is stored of a prompt: what may be reused, and the text elsewhere that is stored, but may not move."""

    matches: list[Match]
    staying: list[NotReused]


class NamespaceIndex:
    """The runs of one namespace, and the matchers that find them."""

    def __init__(
        self,
        namespace: Namespace,
        host: PluginHost,
        threads: MatchThreads,
        *,
        changed: Callable[["NamespaceIndex"], None] | None = None,
    ) -> None:
        """``changed`` is called when something was stored or dropped."""
        self.namespace = namespace
        self.digest = namespace.digest
        self.base = namespace.base.digest
        """The digest of the engine's namespace, of which this one is a variant."""
        self.runs: dict[int, Run] = {}
        self._by_key: dict[RunKey, list[Run]] = {}
        """The runs by name in the store. One run of another hub may be several here: its chunks come in any order."""
        self.n_chunks = self.n_tokens = 0
        self.growing: set[Run] = set()
        """The runs that a write lease extends; each run has one such lease at a time."""
        self._changed = changed or (lambda index: None)
        self.queue = MatchQueue(threads)
        """The queue, which does all work on the matchers."""
        self._nbytes = 0
        self._is_measured = True
        made = [(choice, host.create("matcher", choice.name, choice.options)) for choice in namespace.matchers]
        self._matchers: list[Matcher] = [matcher for _, matcher in made]
        new_like = {  # the first of each
            matcher.reach == "prefix": partial(host.create, "matcher", choice.name, choice.options)
            for choice, matcher in reversed(made)
        }
        self._settled = SettledMatches(new_like.get(True))
        self._staying: Matcher | None = None
        """A matcher that finds text which may not move, so that a lookup can say so; made when it is needed."""
        self._new_staying = new_like.get(False)

    @property
    def nbytes(self) -> int:
        """The memory that the matchers use; while a thread works on them, or if one fails, what they used before."""
        if self.queue.is_idle:
            try:
                used = sum(matcher.nbytes for matcher in self._matchers) + self._settled.nbytes
                used += self._staying.nbytes if self._staying is not None else 0
            except Exception:  # the fault of a plugin in one namespace is none of what counts all namespaces
                if self._is_measured:
                    log.warning("a matcher does not say how much memory it uses", exc_info=True)
                self._is_measured = False
            else:
                self._nbytes, self._is_measured = used, True
        return self._nbytes

    def chunks(self) -> Iterator[Chunk]:
        return (chunk for run in self.runs.values() for chunk in run.chunks.values())

    def named(self, key: RunKey) -> Sequence[Run]:
        """The runs that have this name in the store."""
        return self._by_key.get(key, ())

    def find(self, key: RunKey, span: Span) -> Chunk | None:
        """The chunk that has this name in the store."""
        for run in self.named(key):
            chunk = run.chunks.get(span.start)
            if chunk and chunk.span == span:
                return chunk
        return None

    def look_up(self, tokens: Tokens, settled: float | None = None) -> StoredText:
        """What is stored of these tokens. Part of a queue's work.

        ``settled``: the least share that was recomputed in settled KV; None: none is found.
        """
        found = self.match(tokens, settled)
        matches = [*self._begin_later(found)]
        used = [match.span for match in matches]
        left = [Span(whole.span.start, span.start) for whole, span in zip(found, used, strict=True)]
        staying = [NotReused(span, Why.SHALLOW) for span in left if len(span)]
        if self._staying is not None and max(map(len, gaps(Span(0, len(tokens)), used)), default=0) >= MIN_SAVED_TOKENS:
            stored = ((match.span, self.runs.get(match.run)) for match in self._staying.match(tokens))
            whys = [(span, Why.SHALLOW if run.origin.is_movable else Why.NOT_DONATED) for span, run in stored if run]
            staying += [NotReused(gap, why) for span, why in whys for gap in gaps(span, touching(span, used))]
        return StoredText(matches, staying)

    def match(self, tokens: Tokens, settled: float | None = None) -> list[Match]:
        """The matches of these tokens, of which ``cut_at_chunks`` leaves out evicted chunks. Part of a queue's work.

        ``settled``: the least share that was recomputed in settled KV; None: none is found.
        """
        answers = [matcher.match(tokens) for matcher in self._matchers]
        if settled is not None:
            answers.append(self._settled.match(tokens, settled))
        # A run may have been dropped since its matcher looked.
        return combine([[m for m in answer if m.run in self.runs] for answer in answers])

    def _begin_later(self, matches: Iterable[Match]) -> Iterator[Match]:
        """Where only the first tokens of a text stay, they are a hole. If that is too short to be stored, the match
        behind it begins later: one prompt computes both, and each later one moves them.
        """
        end = 0
        for match in matches:
            run = self.runs.get(match.run)
            was_cut = run is not None and match.moved and 0 < match.source_start == run.origin.movable_from <= end
            if was_cut and 0 < match.span.start - end < MIN_SAVED_TOKENS < len(match.span):
                match = match.part(match.span.start + MIN_SAVED_TOKENS, match.span.end)
            yield match
            end = match.span.end

    def cut_at_chunks(self, matches: Iterable[Match], skip_prefix: int = 0) -> list[ChunkMatch]:
        """The matches after ``skip_prefix``, cut at chunk borders; chunks that were dropped meanwhile are left out.

        There are at most as many pieces as one message may concern.
        """
        chunk_matches: list[ChunkMatch] = []
        for match in matches:
            run = self.runs.get(match.run)
            if run is None:
                continue
            shift = match.source_start - match.span.start
            start, end = max(match.span.start, skip_prefix), match.span.end
            if start >= end:
                continue
            for chunk in run.chunks_between(start + shift, end + shift, MOST_CHUNKS - len(chunk_matches)):
                first, last = chunk.span.start - shift, chunk.span.end - shift
                # Not max() and min(): a long prompt has many, and these calls are slow.
                chunk_matches.append(
                    ChunkMatch(match, first if first > start else start, last if last < end else end, chunk)
                )
            if len(chunk_matches) >= MOST_CHUNKS:
                return chunk_matches[:MOST_CHUNKS]
        return chunk_matches

    def examine(self, tokens: Tokens, span: Span, run: Run | None, origin: Origin) -> tuple[int, bool]:
        """How much of the span needs no second copy. Part of a queue's work.

        Returns the position up to which exact KV of the span is stored without a gap, as much of it movable as of
        ``origin``, and whether ``run`` may grow: it has this origin, ends at that position, and has the same tokens.
        For KV that is neither exact nor movable, settled KV is as good as exact KV, however much of it was recomputed.
        """
        reached = span.start
        for match in self.match(tokens[: span.end], None if origin.exact or origin.is_movable else 0.0):
            found = self.runs.get(match.run)
            moves = found is not None and found.origin.movable_from <= origin.movable_from
            if moves and not match.moved and match.span.start <= reached:
                reached = max(reached, match.span.end)
        reached = min(reached, span.end)
        return reached, run is not None and run.origin == origin and run.continues(tokens, reached)

    @property
    def finds_settled(self) -> bool:
        """Whether settled KV can be found: if one of the matchers finds prefixes."""
        return self._settled.can_match

    def publish(self, run: Run, tokens: Tokens, chunks: list[Chunk]) -> None:
        """Append chunks, ascending, to a run, and make them matchable: at once, or when the queue is done with that."""
        span = Span(chunks[0].span.start, chunks[-1].span.end)
        if run.end != span.start:
            raise InvalidInput(f"run {run.id} ends at {run.end}; it does not grow at {span.start}")
        # Matchers take runs without gaps, but a store may have lost some chunks.
        missing = list(gaps(span, (chunk.span for chunk in chunks)))
        # Before the matchers have it: what they name is looked up here.
        self.runs[run.id] = run
        self.queue.update(partial(self._store, run, tokens, span, missing), span.end)
        run.end = span.end
        if run not in (named := self._by_key.setdefault(run.key, [])):
            named.append(run)
        for chunk in chunks:
            run.add(chunk)
            self.n_tokens += len(chunk.span)
        self.n_chunks += len(chunks)
        self._changed(self)

    def drop(self, chunk: Chunk) -> None:
        """Forget a chunk that is neither in the arena nor in the store."""
        run = chunk.run
        self.queue.update(partial(self._discard, run, chunk.span), 0)
        run.remove(chunk)
        chunk.in_store = False
        self.n_chunks -= 1
        self.n_tokens -= len(chunk.span)
        if not run.chunks:
            del self.runs[run.id]
            self._by_key[run.key].remove(run)
            if not self._by_key[run.key]:
                del self._by_key[run.key]
        self._changed(self)

    def _store(self, run: Run, tokens: Tokens, span: Span, missing: list[Span]) -> None:
        if run.origin.exact and self._new_staying and self._staying is None and span.start < run.origin.movable_from:
            self._staying = self._new_staying()
        for matcher, part in self._parts(run.origin, span):
            matcher.add(run.id, tokens, part, run.origin.exact)
        if not run.origin.exact:
            self._settled.add(run.id, run.origin.ratio, tokens, span)
        run.note_tokens(tokens, span.end)
        for gap in missing:
            self._discard(run, gap)

    def _discard(self, run: Run, span: Span) -> None:
        for matcher, part in self._parts(run.origin, span):
            matcher.discard(run.id, part)
        self._settled.discard(run.id, span)

    def _parts(self, origin: Origin, span: Span) -> Iterator[tuple[Matcher, Span]]:
        """The matchers that find KV of this origin, and the part of the span that each finds."""
        border = min(max(span.start, origin.movable_from), span.end)
        for matcher in self._matchers:
            start = span.start if matcher.reach == "prefix" and origin.exact else border
            if start < span.end:
                yield matcher, Span(start, span.end)
        if self._staying is not None and origin.exact and span.start < border:
            yield self._staying, Span(span.start, border)

    def check_integrity(self) -> None:
        chunks = list(self.chunks())
        assert self.n_chunks == len(chunks)
        assert self.n_tokens == sum(len(chunk.span) for chunk in chunks)
        if self.queue.is_idle:
            in_matchers = Counter[Matcher]()
            for chunk in chunks:
                for matcher, part in self._parts(chunk.run.origin, chunk.span):
                    in_matchers[matcher] += len(part)
            for matcher in [*self._matchers, *([] if self._staying is None else [self._staying])]:
                assert len(matcher) == in_matchers[matcher], "a matcher knows other tokens than the index"
            inexact = [run for run in self.runs.values() if not run.origin.exact]
            self._settled.check_integrity(
                {run.id: sum(len(chunk.span) for chunk in run.chunks.values()) for run in inexact}
            )
        for run in self.runs.values():
            assert run.chunks, "the index keeps a run without chunks"
            assert all(chunk.run is run and run.chunks[start] is chunk for start, chunk in run.chunks.items())


def whole_matches(chunk_matches: Sequence[ChunkMatch]) -> list[Match]:
    """The matches that these parts came from, no longer cut at chunk borders."""
    whole: list[Match] = []
    first = last = None
    for part in chunk_matches:
        if first and last and (part.match is not first.match or part.start != last.end):
            whole.append(first.match.part(first.start, last.end))
            first = None
        first, last = first or part, part
    if first and last:
        whole.append(first.match.part(first.start, last.end))
    return whole


def spans_of(chunk_matches: Sequence[ChunkMatch]) -> tuple[Span, ...]:
    """The spans of the prompt that the matches cover; neighbours are joined."""
    return tuple(join_spans(Span(part.start, part.end) for part in chunk_matches))


def content_of(digest: str, tokens: Tokens, span: Span) -> int:
    """A hash of a chunk's tokens, by which an eviction policy recognises a chunk that is stored again."""
    return hash((digest, np.ascontiguousarray(tokens[span.start : span.end]).tobytes()))
