"""What a selector makes of the numbers that it asks to have measured, be they scores or attention."""

from itertools import product

import numpy as np

from blendhub.contracts import Selector
from blendhub.core.spans import Span
from blendhub.testing.selectors.base import BLOCKS, MOVED, SelectorTests, prompt_around, tokens_of
from blendhub.testing.sentences import holds

TWO_SPANS = [Span(10, 74), Span(80, 144)]


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
