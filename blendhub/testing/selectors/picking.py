"""What is picked is in order, inside of what moved, within the budget, and the same on every rank."""

from itertools import product
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blendhub.contracts import Selector
from blendhub.core.spans import Span
from blendhub.testing.run_in_subprocess import run_in_subprocess
from blendhub.testing.selectors.base import BLOCKS, MOVED, RATIOS, SelectorTests, prompt_around, tokens_of
from blendhub.testing.sentences import holds

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

    @holds("At a ratio of 0 it picks nothing, at 1 everything that moved, and between at")
    def test_picks_are_in_order_and_within_the_budget(self, selector: Selector) -> None:
        for moved, block_tokens, ratio in product(MOVED.values(), BLOCKS, RATIOS):
            self.picks(selector, moved, ratio, block_tokens)

    @holds("Some models have attention that cannot be measured; then ``select`` decides")
    def test_it_decides_without_attention_that_cannot_be_measured(self, selector: Selector) -> None:
        if not selector.attended_layers:
            pytest.skip("this selector does not ask what is attended to")
        for moved, block_tokens, ratio in product(MOVED.values(), BLOCKS, RATIOS):
            prompt = prompt_around(moved) | {"attended": None}
            self.picks(selector, moved, ratio, block_tokens, prompt=prompt)

    @holds("A larger ratio never picks fewer.")
    def test_a_larger_ratio_never_picks_fewer(self, selector: Selector) -> None:
        for moved, block_tokens in product(MOVED.values(), BLOCKS):
            ratios = np.linspace(0, 1, 41).tolist()
            counts = [tokens_of(self.picks(selector, moved, ratio, block_tokens)) for ratio in ratios]
            assert counts == sorted(counts), f"{counts} of {moved}"

    @holds("Nothing of the selection is changed.")
    def test_arguments_are_not_changed(self, selector: Selector) -> None:
        moved = MOVED["several spans"].copy()
        scores, prompt = self.scores(selector, moved), prompt_around(moved)
        holes, arrays = prompt["holes"].copy(), [prompt["tokens"]]
        if scores is not None:
            scores[::9] = np.nan
            arrays.append(scores)
        before = [array.tobytes() for array in arrays]
        for array in arrays:
            array.flags.writeable = False
        self.picks(selector, moved, 0.4, 16, scores, prompt)
        assert moved == MOVED["several spans"] and prompt["holes"] == holes
        assert [array.tobytes() for array in arrays] == before

    def test_any_moved_spans(self) -> None:
        """Whatever hypothesis thinks up, with scores that are often equal and sometimes broken."""
        suite, selector = self, self.create()

        @settings(
            max_examples=100,
            deadline=None,
            database=None,
            derandomize=True,  # the result must not depend on chance
            suppress_health_check=list(HealthCheck),
        )
        @given(data=st.data(), moved=moved_spans(), block_tokens=st.sampled_from([1, 2, 5, 16, 64]))
        def check(data: st.DataObject, moved: list[Span], block_tokens: int) -> None:
            low, high = sorted(data.draw(st.tuples(st.floats(0, 1), st.floats(0, 1)), label="ratios"))
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
            assert tokens_of(few) <= tokens_of(many)
            assert suite.picks(selector, moved, low, block_tokens, scores, prompt) == few

        check()


@holds("the same input gives the same answer in every object with the same options,")
class AgreeingTests(SelectorTests):
    """A question gets the same answer from every object in every process, whatever was asked before."""

    def test_two_instances_agree(self) -> None:
        assert self.answers() == self.answers()

    def test_what_was_asked_before_does_not_matter(self, selector: Selector) -> None:
        questions = [(moved, ratio) for moved in MOVED.values() for ratio in (0.1, 0.5)]
        forwards = [self.picks(selector, *question) for question in questions]
        backwards = [self.picks(selector, *question) for question in reversed(questions)]
        assert forwards == backwards[::-1]

    @pytest.mark.slow
    def test_a_process_with_another_hash_seed_agrees(self) -> None:
        assert run_in_subprocess(self, hash_seed="4242") == self.answers()

    def answers(self) -> list[Any]:
        """Answers to a list of questions, some of them with many ties to decide."""
        selector = self.create()
        answers = []
        for moved in MOVED.values():
            for block_tokens in BLOCKS:
                scores = self.scores(selector, moved)
                for rounded in (scores, None if scores is None else scores.round()):
                    answers.append(msgspec.to_builtins(self.picks(selector, moved, 0.3, block_tokens, rounded)))
        return answers
