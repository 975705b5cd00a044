"""The index of stored KV: chunks in runs, runs in namespaces, and the matchers that find their tokens."""

import hashlib
import logging
import secrets
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np

from blendhub.contracts import RunKey
from blendhub.core.errors import InvalidInput
from blendhub.core.layout import MIN_SAVED_TOKENS, Namespace
from blendhub.core.provenance import Provenance
from blendhub.core.spans import Match, Span, combine, gaps, join, join_spans, touching
from blendhub.core.tokens import Tokens
from blendhub.framework.host import PluginHost
from blendhub.hub.index.match_queues import MatchQueue, MatchThreads
from blendhub.hub.index.matchers import Matchers, Use
from blendhub.hub.limits import MAX_CHUNKS
from blendhub.outcome.reasons import NotReused, Why
from blendhub.system.recurring import RecurringWarnings

warnings = RecurringWarnings(logging.getLogger(__name__))


class Chunk:
    """A stored chunk: in the arena, in the store, or in both."""

    __slots__ = ("content", "in_store", "offset", "pins", "run", "span")

    def __init__(self, run: "Run", span: Span, content: int, *, in_store: bool) -> None:
        self.run = run
        self.span = span
        self.offset: int | None = None
        """The offset of the chunk's slot in the arena; None while the chunk is only in the store."""
        self.pins = 0
        """The number of leases and transfers that use the chunk. A pinned chunk is not evicted."""
        self.in_store = in_store
        self.content = content
        """A hash of the tokens, by which an eviction policy recognises a chunk that is stored again."""

    @property
    def slot_bytes(self) -> int:
        """What its slot takes."""
        return self.run.index.namespace.slot_bytes_of(self.run.provenance, self.span.end)


class Run:
    """Chunks whose KV was computed in one go, at positions that follow each other."""

    __slots__ = (
        *("_hash", "_hashed", "_starts", "chunks", "end", "foreign"),
        *("id", "index", "key", "listed", "provenance", "tokens"),
    )

    def __init__(
        self,
        id: int,
        index: "NamespaceIndex",
        end: int,
        provenance: Provenance,
        key: RunKey | None = None,
        *,
        foreign: bool = False,
    ) -> None:
        self.id = id
        self.index = index
        self.end = end
        """The end of the last chunk that was ever published, or of the tokens that the store may have; the run may
        grow there."""
        self.provenance = provenance
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
    states: list[Match]
    """The chunks that end with a state of recurrent layers, which may be matched without it, too."""
    segments: list[Match]
    """Whole segments, which may overlap each other and the matches."""


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
        self.matchers = Matchers(namespace, host)
        self._nbytes = 0

    @property
    def nbytes(self) -> int:
        """The memory that the matchers use; while a thread works on them, or if one fails, what they used before."""
        if self.queue.is_idle:
            try:
                self._nbytes = self.matchers.nbytes
            except Exception as error:  # of one namespace's matcher, and others ask for the sum of all
                warnings.warn(type(error).__name__, f"a matcher does not tell its memory: {error}", error)
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
        states = self._state_answers(tokens)
        found = self._combined(tokens, states, settled)
        matches = [*self._begin_later(found)]
        used = [match.span for match in matches]
        left = [Span(whole.span.start, span.start) for whole, span in zip(found, used, strict=True)]
        staying = [NotReused(span, Why.SHALLOW) for span in left if len(span)]
        holes = gaps(Span(0, len(tokens)), used)
        if self.matchers.has_any(Use.STAYING) and max(map(len, holes), default=0) >= MIN_SAVED_TOKENS:
            if self.namespace.moves_states:
                # KV behind blended text that stands where it stood.
                unmoved = [match.span for answer in self._answers(tokens, Use.SETTLED) for match, _ in answer]
                used = join_spans([*used, *unmoved])
            for span, code in self._staying(tokens):
                staying += [NotReused(gap, code) for gap in gaps(span, touching(span, used))]
        return StoredText(matches, staying, combine(states), self.matchers.segments.match(tokens))

    def _staying(self, tokens: Tokens) -> Iterator[tuple[Span, Why]]:
        """Text that is stored, but may not move, or has no map with which it could."""
        for answer in self._answers(tokens, Use.STAYING):
            if self.namespace.moves_states:
                # Of one prompt, several runs may be stored: a text ends where it ended there, not where a run does.
                texts = join(Match(match.span, 0, match.source_start, False) for match, _ in answer)
                yield from ((text.span, Why.NO_MAP) for text in texts)
            else:
                for match, run in answer:
                    yield match.span, Why.SHALLOW if run.provenance.is_movable else Why.NOT_DONATED

    def match(self, tokens: Tokens, settled: float | None = None) -> list[Match]:
        """The matches of these tokens, of which ``cut_at_chunks`` leaves out evicted chunks. Part of a queue's work.

        ``settled``: the least share that was recomputed in settled KV; None: none is found.
        """
        return self._combined(tokens, self._state_answers(tokens), settled)

    def _combined(self, tokens: Tokens, states: Sequence[list[Match]], settled: float | None) -> list[Match]:
        # States come second, so that the KV of a prefix is one computation's, even where another has added a state.
        answers = [*([match for match, _ in answer] for answer in self._answers(tokens, Use.REUSE)), *states]
        if settled is not None:
            for answer in self._answers(tokens, Use.SETTLED):
                kept = [match for match, run in answer if match.exact and run.provenance.ratio >= settled]
                answers.append([Match(match.span, match.run, match.source_start, False, True) for match in kept])
        return combine(answers)

    def match_states(self, tokens: Tokens) -> list[Match]:
        """The chunks of these tokens that end with a state. Part of a queue's work."""
        return combine(self._state_answers(tokens))

    def _state_answers(self, tokens: Tokens) -> list[list[Match]]:
        return [[match for match, _ in answer] for answer in self._answers(tokens, Use.STATE)]

    def _answers(self, tokens: Tokens, use: Use) -> Iterator[list[tuple[Match, Run]]]:
        """What each matcher of a use finds, with the runs, of which some may have been dropped since it looked."""
        for answer in self.matchers.match(tokens, use):
            yield [(match, run) for match in answer if (run := self.runs.get(match.run))]

    def _begin_later(self, matches: Iterable[Match]) -> Iterator[Match]:
        """Where only the first tokens of a text stay, they are a hole. If that is too short to be stored, the match
        behind it begins later: one prompt computes both, and each later one moves them.
        """
        end = 0
        for match in matches:
            run = self.runs.get(match.run)
            was_cut = run is not None and match.moved and 0 < match.source_start == run.provenance.movable_from <= end
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
            for chunk in run.chunks_between(start + shift, end + shift, MAX_CHUNKS - len(chunk_matches)):
                first, last = chunk.span.start - shift, chunk.span.end - shift
                # Not max() and min(): a long prompt has many, and these calls are slow.
                chunk_matches.append(
                    ChunkMatch(match, first if first > start else start, last if last < end else end, chunk)
                )
            if len(chunk_matches) >= MAX_CHUNKS:
                return chunk_matches[:MAX_CHUNKS]
        return chunk_matches

    def parts_of_segment(self, match: Match) -> list[ChunkMatch]:
        """What each chunk holds of a whole segment; nothing unless all of its chunks are stored."""
        run, shift = self.runs.get(match.run), match.source_start - match.span.start
        if run is None:
            return []
        spans = self.namespace.chunks_of(Span(match.source_start, match.source_start + len(match.span)))
        # One run of another hub may be several here.
        chunks = [chunk for span in spans if (chunk := self.find(run.key, span))]
        if len(chunks) < len(spans):
            return []
        return [ChunkMatch(match, chunk.span.start - shift, chunk.span.end - shift, chunk) for chunk in chunks]

    def examine(self, tokens: Tokens, span: Span, run: Run | None, provenance: Provenance) -> tuple[int, bool]:
        """How much of the span needs no second copy. Part of a queue's work.

        Returns the position up to which exact KV of the span is stored without a gap, as much of it movable as of
        ``provenance`` says, and whether ``run`` ends at that position and has the same tokens.
        For KV that is neither exact nor movable, settled KV is as good as exact KV, however much of it was recomputed.
        A chunk with a state is as good as one without, but not the other way round. For a segment, only the same text
        as a whole segment will do.
        """
        reached = span.start
        if provenance.map:
            within = self.matchers.segments.match(tokens[span.start : span.end])
            is_stored = any(len(match.span) == len(span) and self.parts_of_segment(match) for match in within)
            return span.end if is_stored else span.start, False
        moves = provenance.is_movable and not self.namespace.moves_states
        settled = None if provenance.is_exact or moves else 0.0
        before = tokens[: span.end]
        for match in self.match_states(before) if provenance.has_state else self.match(before, settled):
            found = self.runs.get(match.run)
            moves_as_far = found is not None and found.provenance.movable_from <= provenance.movable_from
            if moves_as_far and not match.moved and match.span.start <= reached:
                reached = max(reached, match.span.end)
        reached = min(reached, span.end)
        return reached, run is not None and run.continues(tokens, reached)

    def publish(self, run: Run, tokens: Tokens, spans: Sequence[Span], *, in_store: bool = False) -> list[Chunk]:
        """Append chunks, ascending, to a run, and make them matchable: at once, or when the queue is done with that."""
        span = Span(spans[0].start, spans[-1].end)
        if run.end != span.start:
            raise InvalidInput(f"run {run.id} ends at {run.end}; it does not grow at {span.start}")
        # Matchers take runs without gaps, but a store may have lost some chunks.
        missing = list(gaps(span, spans))
        # Before the matchers have it: what they name is looked up here.
        self.runs[run.id] = run
        self.queue.update(partial(self._store, run, tokens, span, missing), span.end)
        run.end = span.end
        if run not in (named := self._by_key.setdefault(run.key, [])):
            named.append(run)
        chunks = [Chunk(run, part, self._content_of(tokens, part), in_store=in_store) for part in spans]
        for chunk in chunks:
            run.add(chunk)
            self.n_tokens += len(chunk.span)
        self.n_chunks += len(chunks)
        self._changed(self)
        return chunks

    def _content_of(self, tokens: Tokens, span: Span) -> int:
        return hash((self.digest, np.ascontiguousarray(tokens[span.start : span.end]).tobytes()))

    def drop(self, chunk: Chunk) -> None:
        """Forget a chunk that is neither in the arena nor in the store."""
        run = chunk.run
        self.queue.update(partial(self.matchers.discard, run.id, run.provenance, chunk.span), 0)
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
        self.matchers.add(run.id, run.provenance, tokens, span)
        run.note_tokens(tokens, span.end)
        for gap in missing:
            self.matchers.discard(run.id, run.provenance, gap)

    def check_integrity(self) -> None:
        chunks = list(self.chunks())
        assert self.n_chunks == len(chunks)
        assert self.n_tokens == sum(len(chunk.span) for chunk in chunks)
        if self.queue.is_idle:
            self.matchers.check_integrity((chunk.run.id, chunk.run.provenance, chunk.span) for chunk in chunks)
        for run in self.runs.values():
            assert run.chunks, "the index keeps a run without chunks"
            assert all(chunk.run is run and run.chunks[start] is chunk for start, chunk in run.chunks.items())
