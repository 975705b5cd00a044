"""The decision about the reuse of one request."""

from collections.abc import Sequence

import msgspec

from blendhub.client.wire import FoundMap
from blendhub.contracts import Segment
from blendhub.core.spans import Match, Span, gaps, total, touching
from blendhub.outcome.reasons import NotReused, Why
from blendhub.vllm.spans import clipped, overlaps


class Refusal(msgspec.Struct, frozen=True):
    """Why nothing, or not all that was found, is reused: a code to count by, and a message to read."""

    code: Why
    message: str


class Decision(msgspec.Struct, frozen=True):
    """Tokens ``[start, end)`` come from BlendHub: some loaded, the holes between them computed."""

    start: int
    """The position up to which vLLM's own cache has the prompt."""
    end: int
    matches: tuple[Match, ...]
    """The matches to load: ascending, each with tokens at or after ``start``."""
    ratio: float
    """The share of moved tokens to recompute."""
    maps: tuple[FoundMap, ...] = ()
    """Of a model with recurrent layers: the map of the states over each moved match."""
    segments: tuple[Span, ...] = ()
    """The spans of which maps are made while they are computed, ascending."""

    @property
    def recomputes(self) -> bool:
        """Whether BlendHub computes some of the tokens."""
        return bool(self.moved or self.holes)

    def recomputed_at(self, ratio: float) -> float:
        """How many tokens are computed to blend what is loaded; the selector may choose a few more or less."""
        return total(self.holes) + ratio * total(self.moved)

    def pieces_of(self, found: Sequence[Segment]) -> tuple[Segment, ...]:
        """The parts to load of the pieces that a lookup has found."""
        spans = [match.span for match in self.matches]
        cut = overlaps(spans, [piece.span for piece in found])
        return tuple(_part(found[at], span) for _, at, span in cut)

    @property
    def _claimed(self) -> Span:
        return Span(self.start, self.end)

    @property
    def exact(self) -> list[Span]:
        return [clipped(match.span, self._claimed) for match in self.matches if match.exact]

    @property
    def state_end(self) -> int:
        """The position up to which the state of recurrent layers is loaded, or vLLM has it."""
        return max((span.end for span in self.exact), default=self.start)

    @property
    def settled(self) -> list[Span]:
        """The spans loaded as they are: blended before behind the same whole prefix, or computed behind such KV."""
        return [clipped(match.span, self._claimed) for match in self.matches if match.settled]

    @property
    def moved(self) -> list[Span]:
        """The spans of reused text that was computed at another place; neighbours are not joined."""
        return [clipped(match.span, self._claimed) for match in self.matches if match.moved]

    @property
    def sources(self) -> tuple[Match, ...]:
        """Where the loaded tokens come from."""
        loaded = (match for match in self.matches if match.span.end > self.start)
        return tuple(match.part(max(self.start, match.span.start), match.span.end) for match in loaded)

    @property
    def holes(self) -> list[Span]:
        return list(gaps(self._claimed, (match.span for match in self.matches)))

    @property
    def first_approximate(self) -> int | None:
        """The first position whose KV is not what the model alone would compute; None if there is no such position."""
        return min((span.start for span in [*self.moved, *self.settled]), default=None)


def without(pieces: Sequence[Segment], spans: Sequence[Span]) -> list[Segment]:
    """The parts of the pieces that none of the spans, which are ascending, touches."""
    return [_part(piece, gap) for piece in pieces for gap in gaps(piece.span, touching(piece.span, spans))]


def _part(piece: Segment, span: Span) -> Segment:
    behind = span.start - piece.span.start
    return Segment(span, piece.shard, piece.row + behind, piece.source_start + behind)


class Choice(msgspec.Struct, frozen=True):
    """What a request reuses of what was found, and why it reuses no more."""

    decision: Decision | None
    """None if nothing is reused."""
    refusal: Refusal | None = None
    """Why some of what was found is not reused; None if all of it is reused, or could not be."""
    unused: tuple[NotReused, ...] = ()
    """The reason of each stretch that was found and is not reused."""
