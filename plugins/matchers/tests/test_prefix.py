"""The prefix matcher against what can be said of every position by itself."""

import time

import numpy as np
import pytest
from blendhub_matchers.prefix import PrefixMatcher
from hypothesis import given
from hypothesis import strategies as st

from blendhub import Span
from blendhub.core.errors import InvalidInput
from blendhub.core.spans import check_tiling

CHUNK = 4
"""The most tokens of a node: few, so that runs end in all of its places."""

Stored = tuple[list[int], int, list[tuple[int, int]]]
"""A sequence, the position from which its KV is stored, and what of that is discarded again."""


@st.composite
def stored(draw: st.DrawFn) -> Stored:
    sequence = draw(st.lists(st.integers(0, 1), min_size=1, max_size=3 * CHUNK))
    start = draw(st.integers(0, len(sequence) - 1))
    borders = draw(st.lists(st.integers(start, len(sequence)), max_size=6))
    ordered = sorted(set(borders))
    return sequence, start, list(zip(ordered[::2], ordered[1::2], strict=False))


@given(st.lists(stored(), max_size=6), st.lists(st.integers(0, 1), min_size=1, max_size=3 * CHUNK))
def test_every_position_that_a_run_holds_after_the_same_tokens_is_found(runs: list[Stored], prompt: list[int]) -> None:
    matcher = PrefixMatcher(node_tokens=CHUNK)
    held: set[tuple[int, int]] = set()
    for run, (sequence, start, discarded) in enumerate(runs):
        matcher.add(run, np.array(sequence, np.uint32), Span(start, len(sequence)))
        held |= {(run, at) for at in range(start, len(sequence))}
        for first, end in discarded:
            matcher.discard(run, Span(first, end))
            held -= {(run, at) for at in range(first, end)}

    matches = matcher.match(np.array(prompt, np.uint32))

    check_tiling(len(prompt), matches)
    found = {(match.run, at) for match in matches for at in range(match.span.start, match.span.end)}
    right = {(run, at) for run, at in held if runs[run][0][: at + 1] == prompt[: at + 1]}
    assert found <= right and {at for _, at in found} == {at for _, at in right}
    assert all(match.exact and match.source_start == match.span.start for match in matches)


def a_matcher_with_a_long_run() -> tuple[PrefixMatcher, np.ndarray]:
    matcher = PrefixMatcher()
    prompt = np.random.default_rng(1).integers(0, 2**32, 3000, dtype=np.uint32)
    matcher.add(0, prompt, Span(0, len(prompt)))
    return matcher, prompt


def followed_by(prompt: np.ndarray, token: int) -> np.ndarray:
    return np.concatenate([prompt, np.array([token], np.uint32)])


def seconds_of_a_match(matcher: PrefixMatcher, prompt: np.ndarray) -> float:
    taken = []
    for _ in range(20):
        begun = time.perf_counter()
        matcher.match(prompt)
        taken.append(time.perf_counter() - begun)
    return min(taken)


@pytest.mark.parametrize("n_tokens", [2000, 1], ids=["different tokens", "the same token"])
def test_many_short_runs_behind_one_prompt_leave_a_lookup_as_fast_as_it_was(n_tokens: int) -> None:
    matcher, prompt = a_matcher_with_a_long_run()
    for run in range(2000):
        matcher.add(run + 1, followed_by(prompt, run % n_tokens), Span(len(prompt), len(prompt) + 1), exact=False)
    asked = followed_by(followed_by(prompt, 0), 7)
    assert [match.span for match in matcher.match(asked)] == [Span(0, 3000), Span(3000, 3001)]
    assert seconds_of_a_match(matcher, asked) < 0.002


def test_memory_grows_with_the_stored_spans_and_not_with_where_prompts_once_parted() -> None:
    matcher, prompt = a_matcher_with_a_long_run()
    alone = matcher.nbytes
    assert alone < 4 * len(prompt) + 3000
    for at in range(100, len(prompt), 10):
        matcher.add(at, followed_by(prompt[:at], 7), Span(at, at + 1))
    assert matcher.nbytes < alone + 290 * 4000
    for at in range(100, len(prompt), 10):
        matcher.discard(at, Span(at, at + 1))
    assert matcher.nbytes == alone
    assert [match.span for match in matcher.match(prompt)] == [Span(0, 3000)]


def test_a_run_does_not_grow_by_the_tokens_of_another_sequence() -> None:
    matcher, tokens = PrefixMatcher(CHUNK), np.arange(64, dtype=np.uint32)
    matcher.add(1, tokens, Span(0, 32))
    other = tokens.copy()
    other[5] = 99
    with pytest.raises(InvalidInput, match="another sequence"):
        matcher.add(1, other, Span(32, 64))
    assert [match.span for match in matcher.match(tokens)] == [Span(0, 32)]
