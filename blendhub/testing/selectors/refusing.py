"""Bad input is refused with InvalidInput, in a sentence, and the selector works on."""

from typing import Any

import numpy as np
import pytest

from blendhub.contracts import Selection, Selector
from blendhub.errors import InvalidInput
from blendhub.plan import Span
from blendhub.testing.selectors.base import MOVED, SelectorTests, prompt_around
from blendhub.testing.sentences import holds

BAD_MOVED: dict[str, Any] = {
    "spans that overlap": [Span(0, 10), Span(9, 20)],
    "a span twice": [Span(0, 10), Span(0, 10)],
    "spans that descend": [Span(30, 40), Span(0, 10)],
    "an empty span": [Span(0, 10), Span(12, 12), Span(20, 30)],
    "pairs instead of spans": [(0, 10), (20, 30)],
    "nothing in the list": [Span(0, 10), None],
}
BAD_RATIOS: list[Any] = [-0.1, -1e-12, 1.0000001, 15, float("nan"), float("inf"), "0.5", None]
BAD_BLOCKS: list[Any] = [0, -1, 1.5, "16", None]
BAD_SCORES: dict[str, Any] = {
    "none": None,
    "too few": np.zeros(249, np.float32),
    "a list": [0.0] * 250,
    "float64": np.zeros(250),
    "integers": np.zeros(250, np.int64),
    "two dimensions": np.zeros((250, 1), np.float32),
    "no dimension": np.float32(1),
}
BAD_HOLES: dict[str, Any] = {
    "a hole in what moved": [Span(29, 33)],
    "holes that overlap": [Span(30, 35), Span(34, 40)],
    "an empty hole": [Span(30, 30)],
    "a pair instead of a span": [(30, 40)],
}
BAD_QUESTIONS: dict[str, Any] = {
    "before what moved": Span(0, 5),
    "in what moved": Span(249, 262),
    "beyond the prompt": Span(250, 263),
    "a pair instead of a span": (250, 262),
    "none": None,
}
BAD_TOKENS: dict[str, Any] = {
    "too few": np.zeros(261, np.uint32),
    "a list": [0] * 262,
    "signed": np.zeros(262, np.int64),
    "two dimensions": np.zeros((262, 1), np.uint32),
    "none": None,
}
BAD_SENSITIVITY: dict[str, Any] = {
    "too few": np.zeros(261, np.uint8),
    "too many": np.zeros(263, np.uint8),
    "a byte string": bytes(262),
    "float32": np.zeros(262, np.float32),
    "two dimensions": np.zeros((262, 1), np.uint8),
    "none": None,
}


@holds("Bad input raises InvalidInput.")
class RefusingTests(SelectorTests):
    """Every bad argument beside good ones."""

    @pytest.mark.parametrize("moved", BAD_MOVED.values(), ids=BAD_MOVED)
    def test_refuses_moved_spans(self, selector: Selector, moved: Any) -> None:
        self.refuses(selector, moved=moved, scores=self.scores(selector, [Span(0, 50)]))

    @pytest.mark.parametrize("ratio", BAD_RATIOS, ids=repr)
    def test_refuses_ratios(self, selector: Selector, ratio: Any) -> None:
        self.refuses(selector, ratio=ratio)

    @pytest.mark.parametrize("block_tokens", BAD_BLOCKS, ids=repr)
    def test_refuses_block_tokens(self, selector: Selector, block_tokens: Any) -> None:
        self.refuses(selector, block_tokens=block_tokens)

    @pytest.mark.parametrize("holes", BAD_HOLES.values(), ids=BAD_HOLES)
    def test_refuses_holes(self, selector: Selector, holes: Any) -> None:
        self.refuses(selector, holes=holes)

    @pytest.mark.parametrize("question", BAD_QUESTIONS.values(), ids=BAD_QUESTIONS)
    def test_refuses_questions(self, selector: Selector, question: Any) -> None:
        self.refuses(selector, question=question)

    @pytest.mark.parametrize("tokens", BAD_TOKENS.values(), ids=BAD_TOKENS)
    def test_refuses_tokens(self, selector: Selector, tokens: Any) -> None:
        self.refuses(selector, tokens=tokens)

    @pytest.mark.parametrize("sensitivity", BAD_SENSITIVITY.values(), ids=BAD_SENSITIVITY)
    def test_refuses_sensitivity(self, selector: Selector, sensitivity: Any) -> None:
        self.refuses(selector, sensitivity=sensitivity)

    @pytest.mark.parametrize("scores", BAD_SCORES.values(), ids=BAD_SCORES)
    def test_refuses_scores(self, selector: Selector, scores: Any) -> None:
        self.needs_probe(selector)
        self.refuses(selector, scores=scores)

    def test_refuses_scores_that_were_not_asked_for(self, selector: Selector) -> None:
        if selector.probe_layer:
            pytest.skip("this selector asks for scores")
        self.refuses(selector, scores=np.zeros(250, np.float32))

    def refuses(self, selector: Selector, **bad: Any) -> None:
        """That the selector refuses a good call with something bad in it, and answers the good one as before."""
        moved = MOVED["several spans"]
        scores = self.scores(selector, moved)
        good: dict[str, Any] = {"moved": moved, "ratio": 0.4, "block_tokens": 16, "scores": scores}
        good |= prompt_around(moved)
        expected = selector.select(Selection(**good))
        with pytest.raises(InvalidInput, match=r"\w+ \w+ \w+"):
            selector.select(Selection(**{**good, **bad}))
        assert selector.select(Selection(**good)) == expected
