"""What is picked is in order, inside of what moved, and within the budget."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blendhub.contracts import Selector
from blendhub.plan import Span
from blendhub.testing.selectors.base import BLOCKS, MOVED, RATIOS, SelectorTests, joined, tokens_of

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
    def test_nothing_is_picked_at_0(self, selector: Selector, moved: list[Span]) -> None:
        self._needs_ratio()
        assert self.picks(selector, moved, 0.0) == []

    @pytest.mark.parametrize("moved", MOVED.values(), ids=MOVED)
    def test_everything_is_picked_at_1(self, selector: Selector, moved: list[Span]) -> None:
        self._needs_ratio()
        assert self.picks(selector, moved, 1.0) == joined(moved)

    def test_an_integer_is_a_ratio(self, selector: Selector) -> None:
        for moved in MOVED.values():
            for ratio in (0, 1):
                assert self.picks(selector, moved, ratio) == self.picks(selector, moved, float(ratio))

    @pytest.mark.parametrize("block_tokens", BLOCKS)
    @pytest.mark.parametrize("moved", MOVED.values(), ids=MOVED)
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
            picks = selector.select(moved, ratio, 16, scores)
            chosen, allowed = np.zeros((2, moved[-1].end + 1), bool)
            for span in moved:
                allowed[span.start : span.end] = True
            for span in picks:
                assert not chosen[max(0, span.start - 1) : span.end + 1].any(), f"{span} touches another pick"
                chosen[span.start : span.end] = True
            assert not (chosen & ~allowed).any(), "picked what did not move"
            if not self.capabilities:
                assert chosen.sum() <= np.ceil(ratio * allowed.sum())

    def test_arguments_are_not_changed(self, selector: Selector) -> None:
        moved = MOVED["several spans"].copy()
        scores = self.scores(selector, moved)
        if scores is not None:
            scores[::9] = np.nan
            before = scores.tobytes()
            scores.flags.writeable = False
        self.picks(selector, moved, 0.4, 16, scores)
        assert moved == MOVED["several spans"]
        assert scores is None or scores.tobytes() == before

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
            few = suite.picks(selector, moved, low, block_tokens, scores)
            many = suite.picks(selector, moved, high, block_tokens, scores)
            assert tokens_of(few) <= tokens_of(many)
            assert suite.picks(selector, moved, low, block_tokens, scores) == few

        check()

    def _needs_ratio(self) -> None:
        if "no_ratio" in self.capabilities:
            pytest.skip("a selector with the capability no_ratio does not look at the ratio")
