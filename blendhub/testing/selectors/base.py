"""What all parts of the selector suite share: how to make a selector, moved spans, and how an answer is judged."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest

from blendhub.contracts import Selection, Selector, checked_picks
from blendhub.core.spans import Span, gaps

Scores: TypeAlias = npt.NDArray[np.float32]

MOVED = {
    "one span": [Span(0, 64)],
    "a span in the middle": [Span(100, 163)],
    "several spans": [Span(5, 30), Span(40, 41), Span(60, 200), Span(201, 250)],
    "spans that touch": [Span(8, 24), Span(24, 57), Span(57, 80), Span(90, 100)],
    "one token": [Span(7, 8)],
    "single tokens": [Span(at, at + 1) for at in range(3, 60, 3)],
    "single tokens that touch": [Span(at, at + 1) for at in range(9, 40)],
    "a short span and a long one": [Span(1, 3), Span(1000, 2003)],
}
BLOCKS = (1, 16, 10**6)
QUESTION_TOKENS = 12


def tokens_of(spans: Sequence[Span]) -> int:
    return sum(len(span) for span in spans)


def prompt_around(
    moved: Sequence[Span], seed: int = 3, words: int = 50, question_tokens: int = QUESTION_TOKENS
) -> dict[str, Any]:
    """The rest of a :class:`Selection`: half of the gaps between moved spans are holes, and a question ends the prompt.

    ``words``: how many different tokens there are.
    """
    random = np.random.default_rng(seed)
    end = moved[-1].end if moved else 0
    length = end + question_tokens
    holes = [gap for gap in gaps(Span(0, end), moved) if random.random() < 0.5]
    return {
        "holes": holes,
        "question": Span(end, length),
        "tokens": random.integers(0, words, length).astype(np.uint32),
    }


class SelectorTests(ABC):
    """Base of the parts of the suite. A subclass's ``create`` makes the selector under test."""

    contract: ClassVar[type] = Selector

    capabilities: ClassVar[tuple[str, ...]] = ()
    """What the selector's PluginSpec says it has. Of an installed selector they are taken from there."""

    is_measuring: ClassVar[bool] = False
    is_probing: ClassVar[bool] = False

    @abstractmethod
    def create(self) -> Selector:
        """A new selector, always with the same options."""

    @pytest.fixture
    def selector(self) -> Selector:
        return self.create()

    def measured(self, selector: Selector) -> list[str]:
        """The fields of a selection that hold what the selector asks to have measured."""
        return ["scores"] * bool(selector.probe_layer) + ["attended"] * bool(selector.attended_layers)

    def scores(self, selector: Selector, moved: Sequence[Span], seed: int = 3) -> Scores | None:
        """Numbers as they would be measured for the selector; None for one that asks for nothing."""
        if not self.measured(selector):
            return None
        length = moved[-1].end if moved else 0
        return np.random.default_rng(seed).exponential(size=length).astype(np.float32)

    def picks(
        self,
        selector: Selector,
        moved: Sequence[Span],
        ratio: float,
        block_tokens: int = 1,
        scores: Scores | None = None,
        prompt: Mapping[str, Any] | None = None,
    ) -> list[Span]:
        """The selector's answer, found to be in order, and within the budget if it keeps one.

        ``scores`` stand for all that the selector asks to have measured; None: some by chance.
        ``prompt`` is the rest of the selection; None: one with holes and a question.
        """
        if scores is None:
            scores = self.scores(selector, moved)
        prompt = prompt_around(moved) if prompt is None else prompt
        measured = dict.fromkeys(self.measured(selector), scores)
        picks = checked_picks(selector, Selection(moved, ratio, block_tokens, **{**measured, **prompt}))
        n_picked, budget = tokens_of(picks), ceil(ratio * tokens_of(moved))
        if ratio in (0, 1):
            assert n_picked == budget, f"picked {n_picked} of {tokens_of(moved)} tokens at {ratio}"
        elif "own_ratio" not in self.capabilities:
            assert n_picked <= budget, f"picked {n_picked} tokens, but may pick {budget}"
        return picks
