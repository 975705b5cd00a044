"""What a selector that probes makes of its scores."""

from itertools import product

import numpy as np

from blendhub.contracts import Selector
from blendhub.core.spans import Span
from blendhub.testing.selectors.base import MOVED, Scores, SelectorTests, tokens_of
from blendhub.testing.sentences import holds

TWO_SPANS = [Span(10, 74), Span(80, 144)]


def high_in(spans: list[Span], value: float) -> Scores:
    """Scores of a prompt in which both spans moved: ``value`` in these spans, and about 1 elsewhere."""
    scores = np.random.default_rng(5).uniform(0.5, 1.5, TWO_SPANS[-1].end).astype(np.float32)
    for span in spans:
        scores[span.start : span.end] = value
    return scores


@holds("A selector either decides from what is known of the prompt, or first sees how")
class ProbingTests(SelectorTests):
    """The higher a number, be it a score or an attention, the more is gained; what is broken counts as the highest."""

    def test_more_is_picked_where_scores_are_high(self, selector: Selector) -> None:
        self.needs_measurement(selector)
        for value, high in product((100.0, 1e38, np.inf, -np.inf, np.nan), TWO_SPANS):
            picks = self.picks(selector, TWO_SPANS, 0.5, 1, high_in([high], value))
            inside = tokens_of([span for span in picks if high.start <= span.start < high.end])
            assert inside > tokens_of(picks) - inside, f"picked {picks}, but scores are {value} in {high}"

    def test_scores_that_are_not_finite_are_all_the_same(self, selector: Selector) -> None:
        self.needs_measurement(selector)
        highest = float(np.finfo(np.float32).max)
        for ratio, broken in product((0.1, 0.5, 0.9), (np.nan, np.inf, -np.inf)):
            expected = self.picks(selector, TWO_SPANS, ratio, 1, high_in([TWO_SPANS[1]], highest))
            assert self.picks(selector, TWO_SPANS, ratio, 1, high_in([TWO_SPANS[1]], broken)) == expected

    @holds("the same input gives the same answer in every object with the same options,")
    def test_equal_scores_are_decided_alike_by_every_object(self, selector: Selector) -> None:
        """An object that breaks ties by chance, or by its place in memory, picks other tokens than another rank's."""
        self.needs_measurement(selector)
        for moved, value in product(MOVED.values(), (0.0, 1.0, 1e38, np.inf, np.nan)):
            scores = np.full(moved[-1].end, value, np.float32)
            for ratio in (0.0, 0.2, 0.5, 1.0):
                another = self.picks(self.create(), moved, ratio, 16, scores)
                assert self.picks(selector, moved, ratio, 16, scores) == another

    def test_scores_outside_of_what_moved_mean_nothing(self, selector: Selector) -> None:
        self.needs_measurement(selector)
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
