"""The reference that judges matchers, itself held against sets of positions and plain string functions."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendhub import Match, Span
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


def check_true(matches: list[Match], runs: list[tuple[str, set[int]]], prompt: str) -> set[int]:
    """The positions that the matches cover, each of which must be what a run holds."""
    covered: set[int] = set()
    for match in matches:
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
def test_anywhere_covers_every_position_of_every_stored_substring_that_is_long_enough(runs, prompt, guaranteed):
    expected = set()
    for start in range(len(prompt) - guaranteed + 1):
        window = prompt[start : start + guaranteed]
        for text, held in runs:
            for at in range(len(text) - guaranteed + 1):
                if text[at : at + guaranteed] == window and held >= set(range(at, at + guaranteed)):
                    expected |= set(range(start, start + guaranteed))
    matches = matcher_of(runs, "anywhere", guaranteed).match(tokens(prompt))
    assert check_true(matches, runs, prompt) == expected


@given(stored_runs(), TEXTS)
def test_prefix_covers_from_the_start_up_to_the_first_position_that_no_run_holds_after_the_same_text(runs, prompt):
    end = 0
    while end < len(prompt) and any(text[: end + 1] == prompt[: end + 1] and end in held for text, held in runs):
        end += 1
    matches = matcher_of(runs, "prefix", 1).match(tokens(prompt))
    assert check_true(matches, runs, prompt) == set(range(end))


@given(stored_runs(), TEXTS, st.integers(1, 3))
def test_segments_covers_whole_segments_that_are_stored_whole(runs, prompt, guaranteed):
    def segments(text: str) -> list[tuple[str, int]]:
        starts = [0, *(at + 1 for at, letter in enumerate(text) if letter == "|")]
        return [(part, start) for part, start in zip(text.split("|"), starts, strict=True) if len(part) >= guaranteed]

    stored = {
        part for text, held in runs for part, start in segments(text) if held >= set(range(start, start + len(part)))
    }
    expected = {at for part, start in segments(prompt) if part in stored for at in range(start, start + len(part))}
    matches = matcher_of(runs, "segments", guaranteed).match(tokens(prompt))
    assert check_true(matches, runs, prompt) == expected


@pytest.mark.parametrize("reach", ["prefix", "segments", "anywhere"])
def test_what_is_discarded_is_neither_found_nor_held(reach):
    matcher = ReferenceMatcher(reach)
    matcher.add(1, tokens("abab"), Span(0, 4))
    assert matcher.match(tokens("abab")) and len(matcher) == 4 and matcher.nbytes > 0
    matcher.discard(1, Span(0, 4))
    assert matcher.match(tokens("abab")) == [] and len(matcher) == matcher.nbytes == 0
