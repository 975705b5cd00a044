"""Spans and matches of short prompts, drawn; twins of the code look at one token at a time."""

from collections.abc import Iterable

from hypothesis import strategies as st

from blendhub import Match, Span

KINDS = [(True, False), (False, True), (False, False)]
"""Whether a match is exact, and whether it is settled, in the order in which matches are preferred."""


def spans_in(length: int) -> st.SearchStrategy[Span]:
    return st.tuples(st.integers(0, length), st.integers(0, length)).map(lambda ends: Span(min(ends), max(ends)))


@st.composite
def matches_of(draw: st.DrawFn, length: int) -> list[Match]:
    """Disjoint, ascending matches, of few runs and sources, so that neighbours often continue each other."""
    borders = sorted(draw(st.sets(st.integers(0, length), max_size=10)))
    matches = []
    for start, end in zip(borders[::2], borders[1::2], strict=False):
        exact, settled = draw(st.sampled_from(KINDS))
        source = start if exact or settled else draw(st.sampled_from([start + 100, start + 200]))
        matches.append(Match(Span(start, end), draw(st.integers(1, 2)), source, exact, settled))
    return matches


def positions(spans: Iterable[Span]) -> list[int]:
    return [position for span in spans for position in range(span.start, span.end)]


def tokens_of(matches: Iterable[Match]) -> dict[int, tuple[int, int, bool, bool]]:
    """The source and kind of each covered token."""
    return {
        match.span.start + at: (match.run, match.source_start + at, match.exact, match.settled)
        for match in matches
        for at in range(len(match.span))
    }
