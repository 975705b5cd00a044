"""What is stored of a prompt, and where it is: the answer to a lookup and to a preview."""

import asyncio
from collections.abc import Awaitable, Sequence
from functools import partial

from blendhub.core.spans import Match, Span, join_spans
from blendhub.core.tokens import Tokens
from blendhub.hub.index.namespace_index import ChunkMatch, NamespaceIndex, StoredText
from blendhub.outcome.reasons import NotReused, Why


class Finding:
    """The parts of a prompt's matches that lie in one chunk each, of which some are in the store only.

    Of a model with recurrent layers: exact ones without a gap, up to the last state. The KV may be of other chunks than
    the one that ends with the state, as vLLM's own cache has it.
    """

    __slots__ = ("_index", "_skip_prefix", "_stored", "in_arena", "in_store", "parts", "state", "staying")

    def __init__(self, index: NamespaceIndex, stored: StoredText, skip_prefix: int) -> None:
        self._index = index
        self._stored = stored
        self._skip_prefix = skip_prefix
        self.locate()

    def locate(self) -> None:
        """Tell anew where it is. Chunks that were dropped meanwhile are left out."""
        self.parts = self._index.cut_at_chunks(self._stored.matches, self._skip_prefix)
        self.staying = self._stored.staying
        self.state: ChunkMatch | None = None
        if self._index.namespace.state_layouts:
            self._locate_state(self._index.cut_at_chunks(self._stored.states, self._skip_prefix))
        else:
            self.in_arena = _in_arena(self.parts)
            self.in_store = [part for part in self.parts if part.chunk.offset is None]

    def _locate_state(self, states: Sequence[ChunkMatch]) -> None:
        """Leave out what leads to none of these states. What is in the arena leads to one that is there, too."""
        reached = self._reached(self.parts)
        self.parts, last = self._up_to_a_state(self.parts, states)
        self.in_arena, self.state = self._up_to_a_state(_in_arena(self.parts), _in_arena(states))
        wanted = [*self.parts, last] if last else []
        self.in_store = [part for part in wanted if part.chunk.offset is None]
        border = last.end if last else self._skip_prefix
        self.staying = [NotReused(Span(border, reached), Why.NO_STATE)] if border < reached else []

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
        """The spans of the prompt that only the store has; neighbours are joined."""
        return tuple(join_spans(Span(part.start, part.end) for part in self.in_store))


def _in_arena(parts: Sequence[ChunkMatch]) -> list[ChunkMatch]:
    return [part for part in parts if part.chunk.offset is not None]


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
