"""Whether a selector picks spans in order, within moved text, within the budget and the same on every rank; and what it
makes of the scores or the attention that it asks to have measured.
"""

import copy
from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blendhub.contracts import Selector
from blendhub.core.spans import Span
from blendhub.testing.histories import WITHOUT_CHANCE
from blendhub.testing.run_in_subprocess import run_in_subprocess
from blendhub.testing.selectors.base import BLOCKS, MOVED, SelectorTests, prompt_around, tokens_of
from blendhub.testing.sentences import holds

TWO_SPANS = [Span(10, 74), Span(80, 144)]
RATIOS = st.sampled_from([0.0, 1.0]) | st.floats(0, 1)
EQUAL_AND_OTHER_SCORES = st.sampled_from([0.0, 0.0, 1.0, 1.0, 2.5, 1e30, float("inf"), float("nan")])


@st.composite
def moved_spans(draw: st.DrawFn) -> list[Span]:
    spans = []
    at = 0
    lengths = st.one_of(st.integers(1, 3), st.integers(1, 70))
    for gap, length in draw(st.lists(st.tuples(st.sampled_from([0, 0, 1, 20]), lengths), max_size=12)):
        spans.append(Span(at + gap, at + gap + length))
        at = spans[-1].end
    return spans


@holds("Parts of ``selection.moved`` to recompute: a list of spans of int, disjoint,")
class PickingTests(SelectorTests):
    """What an answer must be, whatever the selector's rule."""

    @holds("A selector decides from the prompt alone, or asks for measurements first:")
    def test_what_it_asks_to_have_measured_is_within_bounds(self, selector: Selector) -> None:
        assert type(selector.probe_layer) is int and selector.probe_layer >= 0
        assert 0 < selector.probe_share <= 1
        assert type(selector.attended_layers) is tuple
        assert all(type(depth) is float and 0 <= depth < 1 for depth in selector.attended_layers)
        assert type(selector.attending_tokens) is int and selector.attending_tokens >= 1
        assert bool(selector.probe_layer) == self.is_probing, "selectors with a probe_layer have ScoringTests as a base"
        is_measuring = bool(selector.probe_layer or selector.attended_layers)
        assert is_measuring == self.is_measuring, "selectors that ask for numbers have MeasuringTests as a base"

    @holds("Nothing of the selection is changed.")
    def test_arguments_are_not_changed(self, selector: Selector) -> None:
        moved = MOVED["several spans"].copy()
        scores, prompt = self.scores(selector, moved), prompt_around(moved)
        if scores is not None:
            scores[::9] = np.nan
        before = copy.deepcopy((scores, prompt))
        self.picks(selector, moved, 0.4, 16, scores, prompt)
        np.testing.assert_equal((scores, prompt), before)
        assert moved == MOVED["several spans"]

    @holds("At a ratio of 0 it picks nothing, at 1 everything that moved, and between at")
    def test_any_moved_spans(self) -> None:
        """Whatever hypothesis thinks up, with scores that are often equal and sometimes broken."""
        suite, selector = self, self.create()

        @settings(max_examples=100, **WITHOUT_CHANCE)
        @given(data=st.data(), moved=moved_spans(), block_tokens=st.sampled_from([1, 2, 5, 16, 10**6]))
        def check(data: st.DataObject, moved: list[Span], block_tokens: int) -> None:
            low, high = sorted(data.draw(st.tuples(RATIOS, RATIOS), label="ratios"))
            scores = None
            if suite.measured(selector):
                length = moved[-1].end if moved else 0
                seed = data.draw(st.integers(0, 2**16), label="seed of scores")
                values = data.draw(st.lists(EQUAL_AND_OTHER_SCORES, min_size=1, max_size=6), label="scores")
                scores = np.random.default_rng(seed).choice(np.array(values, np.float32), length)
            prompt = prompt_around(
                moved,
                seed=data.draw(st.integers(0, 2**16), label="seed of the prompt"),
                words=data.draw(st.sampled_from([1, 2, 20, 10**6]), label="words"),
                question_tokens=data.draw(st.sampled_from([0, 1, 8, 300]), label="question tokens"),
            )
            few = suite.picks(selector, moved, low, block_tokens, scores, prompt)
            many = suite.picks(selector, moved, high, block_tokens, scores, prompt)
            assert tokens_of(few) <= tokens_of(many), "a larger ratio picked fewer"
            assert suite.picks(selector, moved, low, block_tokens, scores, prompt) == few

        check()


@holds("the same input gives the same answer in every object with the same options,")
class AgreeingTests(SelectorTests):
    """A question gets the same answer from every object in every process, whatever was asked before."""

    def test_what_was_asked_before_does_not_matter(self) -> None:
        assert self.answers() == self.answers(reversed)[::-1]

    @pytest.mark.slow
    def test_a_process_with_another_hash_seed_agrees(self) -> None:
        assert run_in_subprocess(self, hash_seed="4242") == self.answers()

    def answers(self, in_order: Callable[[list[Any]], Iterable[Any]] = list) -> list[Any]:
        """A new object's answers to a list of questions, some of them with many ties to decide."""
        selector, questions = self.create(), []
        for moved, block_tokens in product(MOVED.values(), BLOCKS):
            scores = self.scores(selector, moved)
            for rounded in (scores, None if scores is None else scores.round()):
                questions.append((moved, 0.3, block_tokens, rounded))
        return [msgspec.to_builtins(self.picks(selector, *question)) for question in in_order(questions)]


class MeasuringTests(SelectorTests):
    """The higher a number, the more is gained; what is broken counts as the highest."""

    is_measuring = True

    @holds("A selector decides from the prompt alone, or asks for measurements first:")
    def test_more_is_picked_where_numbers_are_high(self, selector: Selector) -> None:
        for value, high in product((100.0, 1e38, np.inf, -np.inf, np.nan), TWO_SPANS):
            scores = np.random.default_rng(5).uniform(0.5, 1.5, TWO_SPANS[-1].end).astype(np.float32)
            scores[high.start : high.end] = value
            picks = self.picks(selector, TWO_SPANS, 0.5, 1, scores)
            inside = tokens_of([span for span in picks if high.start <= span.start < high.end])
            assert inside > tokens_of(picks) - inside, f"picked {picks}, but numbers are {value} in {high}"

    @holds("A selector decides from the prompt alone, or asks for measurements first:")
    def test_numbers_outside_of_what_moved_mean_nothing(self, selector: Selector) -> None:
        for moved in MOVED.values():
            scores = self.scores(selector, moved)
            assert scores is not None
            expected = self.picks(selector, moved, 0.3, 16, scores)
            outside = np.ones(len(scores) + 50, bool)
            for span in moved:
                outside[span.start : span.end] = False
            for value in (0.0, 1e38, np.nan):
                others = np.concatenate([scores, np.zeros(50, np.float32)])
                others[outside] = value
                assert self.picks(selector, moved, 0.3, 16, others) == expected

    @holds("Some models have attention that cannot be measured; then ``select`` decides")
    def test_it_decides_without_attention_that_cannot_be_measured(self, selector: Selector) -> None:
        for moved, block_tokens, ratio in product(MOVED.values(), BLOCKS, (0.0, 0.1, 0.5, 1.0)):
            self.picks(selector, moved, ratio, block_tokens, prompt=prompt_around(moved) | {"attended": None})
