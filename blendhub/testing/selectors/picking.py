"""What is picked is in order, inside of what moved, and within the budget."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blendhub.contracts import Selection, Selector
from blendhub.plan import Span
from blendhub.testing.selectors.base import BLOCKS, MOVED, RATIOS, SelectorTests, joined, prompt_around, tokens_of
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

    @pytest.mark.parametrize("block_tokens", BLOCKS)
    @pytest.mark.parametrize("moved", MOVED.values(), ids=MOVED)
    def test_picks_are_in_order_and_within_the_budget(
        self, selector: Selector, moved: list[Span], block_tokens: int
    ) -> None:
        for ratio in RATIOS:
            self.picks(selector, moved, ratio, block_tokens)

    @pytest.mark.parametrize("moved", MOVED.values(), ids=MOVED)
    @holds("At a ratio of 0 it picks nothing, at 1 everything that moved, and between at")
    def test_nothing_is_picked_at_0(self, selector: Selector, moved: list[Span]) -> None:
        self._needs_ratio()
        assert self.picks(selector, moved, 0.0) == []

    @pytest.mark.parametrize("moved", MOVED.values(), ids=MOVED)
    @holds("At a ratio of 0 it picks nothing, at 1 everything that moved, and between at")
    def test_everything_is_picked_at_1(self, selector: Selector, moved: list[Span]) -> None:
        self._needs_ratio()
        assert self.picks(selector, moved, 1.0) == joined(moved)

    def test_an_integer_is_a_ratio(self, selector: Selector) -> None:
        for moved in MOVED.values():
            for ratio in (0, 1):
                assert self.picks(selector, moved, ratio) == self.picks(selector, moved, float(ratio))

    @pytest.mark.parametrize("block_tokens", BLOCKS)
    @pytest.mark.parametrize("moved", MOVED.values(), ids=MOVED)
    @holds("A larger ratio never picks fewer.")
    def test_a_larger_ratio_never_picks_fewer(self, selector: Selector, moved: list[Span], block_tokens: int) -> None:
        counts = [
            tokens_of(self.picks(selector, moved, ratio, block_tokens)) for ratio in np.linspace(0, 1, 41).tolist()
        ]
        assert counts == sorted(counts)

    @pytest.mark.parametrize("ratio", RATIOS)
    def test_nothing_moved(self, selector: Selector, ratio: float) -> None:
        assert self.picks(selector, [], ratio) == []

    def test_moved_spans_may_be_a_tuple(self, selector: Selector) -> None:
        moved = MOVED["several spans"]
        assert self.picks(selector, tuple(moved), 0.3) == self.picks(selector, moved, 0.3)

    def test_a_long_prompt_of_many_spans(self, selector: Selector) -> None:
        moved = [Span(at + at // 7 % 2, at + 97) for at in range(0, 200_000, 97)]
        scores = self.scores(selector, moved)
        for ratio in (0.15, 1.0):
            picks = selector.select(Selection(moved, ratio, 16, scores, **prompt_around(moved, words=5000)))
            chosen, allowed = np.zeros((2, moved[-1].end + 1), bool)
            for span in moved:
                allowed[span.start : span.end] = True
            for span in picks:
                assert not chosen[max(0, span.start - 1) : span.end + 1].any(), f"{span} touches another pick"
                chosen[span.start : span.end] = True
            assert not (chosen & ~allowed).any(), "picked what did not move"
            if not {"own_ratio", "no_ratio"} & set(self.capabilities):
                assert chosen.sum() <= np.ceil(ratio * allowed.sum())

    @pytest.mark.parametrize("moved", MOVED.values(), ids=MOVED)
    def test_arrays_that_are_left_out_are_zeros(self, selector: Selector, moved: list[Span]) -> None:
        end = moved[-1].end
        zeros = {"tokens": np.zeros(end, np.uint32), "sensitivity": np.zeros(end, np.uint8)}
        assert self.picks(selector, moved, 0.4, prompt={}) == self.picks(selector, moved, 0.4, prompt=zeros)

    def test_sensitivity_outside_of_what_moved_means_nothing(self, selector: Selector) -> None:
        for moved in MOVED.values():
            prompt = prompt_around(moved)
            expected = self.picks(selector, moved, 0.3, prompt=prompt)
            outside = np.ones(len(prompt["tokens"]), bool)
            for span in moved:
                outside[span.start : span.end] = False
            for value in (0, 1, 255):
                others = np.where(outside, value, prompt["sensitivity"]).astype(np.uint8)
                assert self.picks(selector, moved, 0.3, prompt={**prompt, "sensitivity": others}) == expected

    @holds("the selector looks at the bytes of sensitivity, which an engine asks of the")
    def test_a_selector_without_the_capability_sensitivity_does_not_look_at_it(self, selector: Selector) -> None:
        if "sensitivity" in self.capabilities:
            pytest.skip("this selector has the capability sensitivity")
        for moved in MOVED.values():
            prompt = prompt_around(moved)
            nothing = {**prompt, "sensitivity": np.zeros_like(prompt["sensitivity"])}
            assert self.picks(selector, moved, 0.3, prompt=nothing) == self.picks(selector, moved, 0.3, prompt=prompt)

    def test_arguments_are_not_changed(self, selector: Selector) -> None:
        moved = MOVED["several spans"].copy()
        scores, prompt = self.scores(selector, moved), prompt_around(moved)
        holes, arrays = prompt["holes"].copy(), [prompt["tokens"], prompt["sensitivity"]]
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
            if selector.probe_layer:
                length = moved[-1].end if moved else 0
                seed = data.draw(st.integers(0, 2**16), label="seed of scores")
                values = data.draw(st.lists(EQUAL_AND_OTHER_SCORES, min_size=1, max_size=6), label="scores")
                scores = np.random.default_rng(seed).choice(np.array(values, np.float32), length)
            prompt = prompt_around(
                moved,
                seed=data.draw(st.integers(0, 2**16), label="seed of the prompt"),
                words=data.draw(st.sampled_from([1, 2, 20, 10**6]), label="words"),
                known=data.draw(st.sampled_from([0.0, 0.3, 1.0]), label="known"),
                question_tokens=data.draw(st.sampled_from([0, 1, 8, 300]), label="question tokens"),
            )
            few = suite.picks(selector, moved, low, block_tokens, scores, prompt)
            many = suite.picks(selector, moved, high, block_tokens, scores, prompt)
            assert tokens_of(few) <= tokens_of(many)
            assert suite.picks(selector, moved, low, block_tokens, scores, prompt) == few

        check()

    def _needs_ratio(self) -> None:
        if "no_ratio" in self.capabilities:
            pytest.skip("a selector with the capability no_ratio does not look at the ratio")
