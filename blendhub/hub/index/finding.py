"""What is stored of a prompt, and where it is: the answer to a lookup and to a preview."""

import asyncio
from bisect import bisect_right
from collections.abc import Awaitable, Iterable, Sequence
from functools import partial
from itertools import accumulate
from typing import TypeAlias

from blendhub.client.wire import FoundMap
from blendhub.core.layout import MIN_SAVED_TOKENS, MIN_SEAM_TOKENS
from blendhub.core.spans import Match, Span, gaps, join_spans, touching
from blendhub.core.tokens import Tokens
from blendhub.hub.index.namespace_index import ChunkMatch, NamespaceIndex, StoredText
from blendhub.hub.limits import MAX_CHUNKS
from blendhub.outcome.reasons import NotReused, Why

SegmentParts: TypeAlias = list[ChunkMatch]
"""The parts of one whole segment, each of which is a chunk."""


class Finding:
    """The parts of a prompt's matches that lie in one chunk each, of which some are in the store only.

    Of a model with recurrent layers: exact ones without a gap, up to the last state. The KV may be of other chunks than
    the one that ends with the state, as vLLM's own cache has it. Behind that, whole segments with a seam before each.
    """

    __slots__ = (
        *("_index", "_skip_prefix", "_stored", "fetched"),
        *("in_arena", "in_store", "maps", "parts", "state", "staying"),
    )

    def __init__(self, index: NamespaceIndex, stored: StoredText, skip_prefix: int) -> None:
        self._index = index
        self._stored = stored
        self._skip_prefix = skip_prefix
        self.in_store: list[ChunkMatch] = []
        self.fetched: tuple[Span, ...] = ()
        """What was in the store only when it was located before, and is in the arena now."""
        self.locate()

    def locate(self) -> None:
        """Tell anew where it is. Chunks that were dropped meanwhile are left out."""
        self.fetched = tuple(join_spans(Span(part.start, part.end) for part in _in_arena(self.in_store)))
        self.parts = self._index.cut_at_chunks(self._stored.matches, self._skip_prefix)
        self.staying = self._stored.staying
        self.state: ChunkMatch | None = None
        self.maps: tuple[FoundMap, ...] = ()
        if self._index.namespace.state_layouts:
            self._locate_state(self._index.cut_at_chunks(self._stored.states, self._skip_prefix))
        else:
            self.in_arena = _in_arena(self.parts)
            self.in_store = [part for part in self.parts if part.chunk.offset is None]

    def _locate_state(self, states: Sequence[ChunkMatch]) -> None:
        """Leave out what leads to none of these states, and add segments. What is in the arena leads to a state that is
        there, too, and its segments are there as a whole."""
        reached = self._reached(self.parts)
        self.parts, last = self._up_to_a_state(self.parts, states)
        self.in_arena, self.state = self._up_to_a_state(_in_arena(self.parts), _in_arena(states))
        border = last.end if last else self._skip_prefix
        whole = [parts for match in self._stored.segments if (parts := self._index.parts_of_segment(match))]
        wanted = self._chosen(whole, border)
        loadable = [parts for parts in whole if len(_in_arena(parts)) == len(parts)]
        ready = self._chosen(loadable, self.state.end if self.state else self._skip_prefix)
        self.parts += [part for parts in wanted for part in parts]
        self.in_arena += [part for parts in ready for part in parts]
        self.in_store = [part for part in [*self.parts, *([last] if last else [])] if part.chunk.offset is None]
        self.maps = tuple(map(_map_of, ready))
        moved = join_spans(_span_of(parts) for parts in (*wanted, *ready))
        stateless = Span(border, max(border, reached))
        self.staying = [NotReused(gap, Why.NO_STATE) for gap in gaps(stateless, moved)]
        used = join_spans([Span(0, stateless.end), *moved])
        left = (gap for text in self._stored.staying for gap in gaps(text.span, used))
        # What is shorter, such as a seam, does not become a segment.
        self.staying += [NotReused(gap, Why.NO_MAP) for gap in left if len(gap) >= MIN_SAVED_TOKENS]

    def _chosen(self, segments: Iterable[SegmentParts], border: int) -> list[SegmentParts]:
        """The segments behind a border, each with a seam before it, that cover most of the prompt together."""
        chosen = _covering_most([parts for parts in segments if parts[0].start >= border + MIN_SEAM_TOKENS])
        n_chunks = list(accumulate(map(len, chosen)))
        return chosen[: bisect_right(n_chunks, MAX_CHUNKS - len(self.parts))]

    def _reached(self, parts: Sequence[ChunkMatch]) -> int:
        """Where the first gap begins between exact parts."""
        reached = self._skip_prefix
        for part in parts:
            if part.start > reached or not part.match.exact:
                break
            reached = part.end
        return reached

    def _up_to_a_state(
        self, parts: Sequence[ChunkMatch], states: Sequence[ChunkMatch]
    ) -> tuple[list[ChunkMatch], ChunkMatch | None]:
        """The exact parts that lead to the last state without a gap, and the chunk that ends with it."""
        reached = self._reached(parts)
        ends = [part for part in states if part.end == part.chunk.span.end <= reached]
        return ([part for part in parts if part.end <= ends[-1].end], ends[-1]) if ends else ([], None)

    @property
    def leased(self) -> list[ChunkMatch]:
        """What a reader needs of the arena: the parts, and behind them the chunk with the state."""
        return [*self.in_arena, self.state] if self.state else self.in_arena

    @property
    def matches(self) -> tuple[Match, ...]:
        """The matches that are in the arena, no longer cut at chunk borders."""
        whole: list[Match] = []
        first = last = None
        for part in self.in_arena:
            if first and last and (part.match is not first.match or part.start != last.end):
                whole.append(first.match.part(first.start, last.end))
                first = None
            first, last = first or part, part
        if first and last:
            whole.append(first.match.part(first.start, last.end))
        return tuple(whole)

    @property
    def on_the_way(self) -> tuple[Span, ...]:
        """The spans of the prompt that only the store has, and no match covers; neighbours are joined."""
        matched = [match.span for match in self.matches]
        spans = join_spans(Span(part.start, part.end) for part in self.in_store)
        return tuple(gap for span in spans for gap in gaps(span, touching(span, matched)))


def _in_arena(parts: Sequence[ChunkMatch]) -> list[ChunkMatch]:
    return [part for part in parts if part.chunk.offset is not None]


def _covering_most(segments: Iterable[SegmentParts]) -> list[SegmentParts]:
    """Of segments that may overlap, ascending ones with room for a seam between them, which have the most tokens."""
    by_end = sorted(segments, key=lambda parts: parts[-1].end)
    ends = [parts[-1].end for parts in by_end]
    # For the first segments, as many as its place says: the most tokens, the last segment of the best choice, and how
    # many segments the others of that choice are among.
    best: list[tuple[int, SegmentParts, int]] = [(0, [], 0)]
    for parts in by_end:
        n_before = bisect_right(ends, parts[0].start - MIN_SEAM_TOKENS)
        n_tokens = best[n_before][0] + len(_span_of(parts))
        best.append((n_tokens, parts, n_before) if n_tokens > best[-1][0] else best[-1])
    chosen = []
    _, parts, n_before = best[-1]
    while parts:
        chosen.append(parts)
        _, parts, n_before = best[n_before]
    return chosen[::-1]


def _span_of(parts: SegmentParts) -> Span:
    return Span(parts[0].start, parts[-1].end)


def _map_of(parts: SegmentParts) -> FoundMap:
    last = parts[-1].chunk
    # It is in the arena, and makes its run a segment.
    assert last.offset is not None and last.run.provenance.map
    return FoundMap(_span_of(parts), last.offset, last.run.provenance.map.shard_bytes)


def find(
    index: NamespaceIndex, tokens: Tokens, settled: float | None = None, skip_prefix: int = 0
) -> Finding | Awaitable[Finding]:
    """What is stored of these tokens; if the namespace's queue is not done with it at once, later.

    ``settled``: the least share that was recomputed in settled KV; None: none is found.
    """
    stored = index.queue.ask(partial(index.look_up, tokens, settled), len(tokens))
    if isinstance(stored, asyncio.Future):
        return _find_later(index, stored, skip_prefix)
    return Finding(index, stored, skip_prefix)


async def _find_later(index: NamespaceIndex, stored: "asyncio.Future[StoredText]", skip_prefix: int) -> Finding:
    return Finding(index, await stored, skip_prefix)
