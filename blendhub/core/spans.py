"""Spans and matches: the arithmetic of tiling a prompt."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from blendhub.core.errors import InvalidInput

Id = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Position = Annotated[int, Meta(ge=0, le=2**40)]
"""A position with the bounds for messages and stores; in memory, nothing checks the bounds."""
NOWHERE = 2**40
"""A position behind every prompt."""


class Span(msgspec.Struct, frozen=True, order=True, array_like=True):
    """The half-open range of tokens ``[start, end)``."""

    start: Position
    end: Position

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.end:
            raise InvalidInput(f"a span needs 0 <= start <= end, got [{self.start}, {self.end})")

    def __len__(self) -> int:
        return self.end - self.start


class Match(msgspec.Struct, frozen=True, array_like=True):
    """``span`` of the prompt holds the same tokens as ``run`` from its position ``source_start`` on.

    ``exact`` promises more: the same positions and the same whole prefix, so that the stored KV is
    bit for bit what the engine would compute. ``settled``: the same positions and the same whole prefix, too, but some
    of that was blended; the KV is loaded as it is. No match is both.
    """

    span: Span
    run: Id
    source_start: Position
    exact: bool
    settled: bool = False

    @property
    def moved(self) -> bool:
        """Whether the KV was computed behind another prefix, or at another position."""
        return not (self.exact or self.settled)

    def part(self, start: int, end: int) -> "Match":
        """The part of this match in ``[start, end)`` of the prompt."""
        if not self.span.start <= start <= end <= self.span.end:
            raise InvalidInput(f"[{start}, {end}) is not part of {self.span}")
        source = self.source_start + start - self.span.start
        return Match(Span(start, end), self.run, source, self.exact, self.settled)

    def continues(self, earlier: "Match") -> bool:
        """Whether this match goes on where ``earlier`` ends, in the prompt and in the run alike."""
        return (
            self.span.start == earlier.span.end
            and self.run == earlier.run
            and self.source_start == earlier.source_start + len(earlier.span)
            and self.exact == earlier.exact
            and self.settled == earlier.settled
        )


def total(spans: Iterable[Span]) -> int:
    return sum(len(span) for span in spans)


def check_tiling(length: int, matches: Iterable[Match]) -> None:
    """Raise unless the matches are disjoint, ascending, not empty, and inside ``[0, length)``."""
    end = 0
    for match in matches:
        if match.span.start < end or match.span.end > length or not len(match.span):
            raise InvalidInput(f"{match} must not be empty, start at {end} or later, and end at {length} or earlier")
        end = match.span.end


def gaps(whole: Span, covered: Iterable[Span]) -> Iterator[Span]:
    """The parts of ``whole`` that no span of ``covered`` (ascending) touches."""
    at = whole.start
    for span in covered:
        if span.end <= at or not len(span):
            continue
        if span.start >= whole.end:
            break
        if span.start > at:
            yield Span(at, span.start)
        at = span.end
    if at < whole.end:
        yield Span(at, whole.end)


def touching(whole: Span, spans: Sequence[Span]) -> Sequence[Span]:
    """Those of the ``spans`` (ascending, disjoint) that share a position with ``whole``."""
    first = bisect_right(spans, whole.start, key=lambda span: span.end)
    return spans[first : bisect_left(spans, whole.end, first, key=lambda span: span.start)]


def join_spans(spans: Iterable[Span]) -> list[Span]:
    """Join spans into disjoint, ascending ones that do not touch."""
    joined: list[Span] = []
    for span in sorted(spans):
        if joined and span.start <= joined[-1].end:
            joined[-1] = Span(joined[-1].start, max(span.end, joined[-1].end))
        elif len(span):
            joined.append(span)
    return joined


def join(matches: Iterable[Match]) -> list[Match]:
    """Ascending matches, with neighbours that continue each other made one."""
    joined: list[Match] = []
    for match in matches:
        if joined and match.continues(joined[-1]):
            first = joined.pop()
            whole = Span(first.span.start, match.span.end)
            match = Match(whole, first.run, first.source_start, first.exact, first.settled)
        joined.append(match)
    return joined


def combine(answers: Sequence[Sequence[Match]]) -> list[Match]:
    """The answers of several matchers to one prompt, as one: exact matches first, then settled ones, then moved ones,
    and of each kind in the order given.

    A later answer fills only what earlier ones left open.
    """
    chosen: list[Match] = []
    for kind in ("exact", "settled", "moved"):
        for answer in answers:
            taken = [match.span for match in chosen]
            for match in answer:
                if getattr(match, kind):
                    open_spans = gaps(match.span, touching(match.span, taken))
                    chosen += [match.part(gap.start, gap.end) for gap in open_spans]
            chosen.sort(key=lambda match: match.span)
    return join(chosen)
