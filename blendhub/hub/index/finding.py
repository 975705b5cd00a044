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

    Of a model with recurrent layers: exact ones without a gap, up to the last state.
    """

    __slots__ = ("_index", "_skip_prefix", "_stored", "in_arena", "in_store", "parts", "staying")

    def __init__(self, index: NamespaceIndex, stored: StoredText, skip_prefix: int) -> None:
        self._index = index
        self._stored = stored
        self._skip_prefix = skip_prefix
        self.locate()

    def locate(self) -> None:
        """Tell anew where it is. Chunks that were dropped meanwhile are left out."""
        self.parts = self._index.cut_at_chunks(self._stored.matches, self._skip_prefix)
        self.staying = self._stored.staying
        if self._index.namespace.state_layouts:
            self.parts, self.staying = self._up_to_a_state(self.parts)
        self.in_arena = [part for part in self.parts if part.chunk.offset is not None]
        self.in_store = [part for part in self.parts if part.chunk.offset is None]
        if self._index.namespace.state_layouts:
            self.in_arena, _ = self._up_to_a_state(self.in_arena)

    def _up_to_a_state(self, parts: Sequence[ChunkMatch]) -> tuple[list[ChunkMatch], list[NotReused]]:
        """The exact parts that lead to the last state without a gap, and what of them lies behind it."""
        reached = border = self._skip_prefix
        n_parts = 0
        for number, part in enumerate(parts, 1):
            if part.start > reached or not part.match.exact:
                break
            reached = part.end
            if part.chunk.run.provenance.has_state and part.end == part.chunk.span.end:
                n_parts, border = number, part.end
        return list(parts[:n_parts]), [NotReused(Span(border, reached), Why.NO_STATE)] if border < reached else []

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
