"""The reference that judges matchers, itself held against sets of positions and plain string functions."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from blendhub import Span
from blendhub.testing import ReferenceMatcher

# Letters stand for tokens, and "|" for the separator: few of them, so that texts repeat each other.
TEXTS = st.text("ab|", min_size=1, max_size=14)


@st.composite
def stored_runs(draw: st.DrawFn) -> list[tuple[str, set[int]]]:
    """Each run's text, and the positions of it that are stored."""
    runs = []
    for text in draw(st.lists(TEXTS, max_size=4)):
        start = draw(st.integers(0, len(text) - 1))
        held = set(range(start, len(text))) - draw(st.sets(st.integers(start, len(text) - 1), max_size=3))
        if held:
            runs.append((text, held))
    return runs


def tokens(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8).astype(np.uint32)


def matcher_of(runs: list[tuple[str, set[int]]], reach, guaranteed: int) -> ReferenceMatcher:
    matcher = ReferenceMatcher(reach, guaranteed, separator=(ord("|"),))
    for run, (text, held) in enumerate(runs):
        first = min(held)
        # All from the first stored position on is added, and what is not held discarded again.
        matcher.add(run, tokens(text), Span(first, len(text)), exact=run % 2 == 0)
        for at in set(range(first, len(text))) - held:
            matcher.discard(run, Span(at, at + 1))
    return matcher


def covered(matcher: ReferenceMatcher, runs: list[tuple[str, set[int]]], prompt: str) -> set[int]:
    """The positions that the matches cover, each of which must be what a run holds."""
    covered: set[int] = set()
    for match in matcher.match(tokens(prompt)):
        text, held = runs[match.run]
        shift = match.source_start - match.span.start
        positions = set(range(match.span.start, match.span.end))
        assert positions and not positions & covered
        assert all(at + shift in held and text[at + shift] == prompt[at] for at in positions)
        same_prefix = shift == 0 and text[: match.span.end] == prompt[: match.span.end]
        assert match.exact == (same_prefix and match.run % 2 == 0)
        covered |= positions
    return covered


@given(stored_runs(), TEXTS, st.integers(1, 4))
def test_each_reach_covers_all_that_it_promises_and_what_is_discarded_is_not_held(runs, prompt, guaranteed):
    windows = {
        text[at : at + guaranteed]
        for text, held in runs
        for at in range(len(text) - guaranteed + 1)
        if held >= set(range(at, at + guaranteed))
    }
    starts = [start for start in range(len(prompt)) if prompt[start : start + guaranteed] in windows]
    anywhere = {at for start in starts for at in range(start, start + guaranteed)}
    matcher = matcher_of(runs, "anywhere", guaranteed)
    assert covered(matcher, runs, prompt) == anywhere

    end = 0
    while end < len(prompt) and any(text[: end + 1] == prompt[: end + 1] and end in held for text, held in runs):
        end += 1
    assert covered(matcher_of(runs, "prefix", 1), runs, prompt) == set(range(end))

    def segments(text: str) -> list[tuple[str, set[int]]]:
        starts = [0, *(at + 1 for at, letter in enumerate(text) if letter == "|")]
        parts = zip(text.split("|"), starts, strict=True)
        return [(part, set(range(start, start + len(part)))) for part, start in parts if len(part) >= guaranteed]

    stored = {part for text, held in runs for part, positions in segments(text) if held >= positions}
    expected = {at for part, positions in segments(prompt) if part in stored for at in positions}
    assert covered(matcher_of(runs, "segments", guaranteed), runs, prompt) == expected

    assert len(matcher) == sum(len(held) for _, held in runs)
    for run, (_, held) in enumerate(runs):
        for at in held:
            matcher.discard(run, Span(at, at + 1))
    assert matcher.match(tokens(prompt)) == [] and len(matcher) == matcher.nbytes == 0
