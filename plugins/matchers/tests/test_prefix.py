"""What only the prefix matcher can get wrong: nodes that runs share, speed, and memory."""

import time

import numpy as np
import pytest
from blendhub_matchers.prefix import PrefixMatcher

from blendhub import Span
from blendhub.contracts import Matcher
from blendhub.core.errors import InvalidInput
from blendhub.testing.matchers.machine import MatcherHistoryTests

CHUNK = 4
"""The most tokens of a node, in which runs that share it part and end."""


class TestWithShortNodes(MatcherHistoryTests):
    """Runs end in all places of their nodes."""

    def create(self) -> Matcher:
        return PrefixMatcher(node_tokens=CHUNK)


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
