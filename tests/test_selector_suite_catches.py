"""Selectors with one fault each, and the test of the suites that must see it."""

from math import ceil
from typing import Any

import numpy as np
import pytest

from blendhub import Span
from blendhub.contracts import Selection, Selector
from blendhub.testing import SelectorSuite
from blendhub.testing.selectors import MeasuringTests, ScoringTests
from tests.suite_runs import proofs

pytestmark = pytest.mark.slow


class Sound(Selector):
    """The tokens with the highest scores, one by one: slow, plain, and without a fault."""

    probe_layer = 1

    def score(self, fresh: Any, stored: Any) -> Any:
        return sum((new.float() - old.float()).square().sum((1, 2)) for new, old in zip(fresh, stored, strict=True))

    def select(self, selection: Selection) -> list[Span]:
        positions = [position for span in selection.moved for position in range(span.start, span.end)]
        picked = self.ranked(positions, self.numbers(selection))[: self.limit(selection, len(positions))]
        return [Span(at, at + 1) for at in sorted(picked)]

    def numbers(self, selection: Selection) -> Any:
        return selection.scores

    def ranked(self, positions: list[int], numbers: Any) -> list[int]:
        finite = np.nan_to_num(numbers, nan=np.inf, neginf=np.inf)
        return sorted(positions, key=lambda position: -finite[position])

    def limit(self, selection: Selection, n_moved: int) -> int:
        return ceil(selection.ratio * n_moved)


class SoundWithoutNumbers(Sound):
    """The first tokens of the prompt that moved."""

    probe_layer = 0
    score = Selector.score

    def numbers(self, selection: Selection) -> Any:
        return np.zeros(len(selection.tokens))


class SoundByAttention(SoundWithoutNumbers):
    """The tokens that are attended to most."""

    attended_layers: tuple[float, ...] = (0.5,)

    def numbers(self, selection: Selection) -> Any:
        return super().numbers(selection) if selection.attended is None else selection.attended


def faulty(sound: type[Sound] = Sound, **changed: Any) -> type[Sound]:
    return type("Faulty", (sound,), changed)


def ranking(rank: Any) -> type[Sound]:
    return faulty(ranked=lambda self, positions, numbers: rank(positions, numbers))


def scoring(score: Any) -> type[Sound]:
    """``score`` gets the right scores, too."""
    return faulty(score=lambda self, fresh, stored: score(Sound.score(self, fresh, stored), fresh, stored))


def rounds_up_to_blocks(self: Sound, selection: Selection, n_moved: int) -> int:
    return -(-Sound.limit(self, selection, n_moved) // selection.block_tokens) * selection.block_tokens


def picks_all_without_attention(self: SoundByAttention, selection: Selection) -> list[Span]:
    measured = selection.attended is not None or not selection.ratio
    return SoundByAttention.select(self, selection) if measured else list(selection.moved)


def of_half_precision(score: Any, fresh: Any, stored: Any) -> Any:
    return sum((new - old).square().sum((1, 2)) for new, old in zip(fresh, stored, strict=True)).float()


FAULTS: dict[str, list[Any]] = {
    "test_what_it_asks_to_have_measured_is_within_bounds": [
        faulty(probe_layer=-1),
        faulty(SoundByAttention, attended_layers=(0.5, 1.0)),
    ],
    "test_any_moved_spans": [faulty(limit=rounds_up_to_blocks)],
    "test_what_was_asked_before_does_not_matter": [
        ranking(lambda positions, scores: np.random.default_rng().permutation(positions).tolist()),
    ],
    "test_more_is_picked_where_numbers_are_high": [
        faulty(ranked=lambda self, positions, scores: Sound.ranked(self, positions, scores)[::-1]),
    ],
    "test_it_decides_without_attention_that_cannot_be_measured": [
        faulty(SoundByAttention, select=picks_all_without_attention),
    ],
    "test_one_float32_a_token": [
        scoring(lambda score, fresh, stored: sum((tensor[..., 0].sum(1)) for tensor in fresh)),
        scoring(of_half_precision),
    ],
}


class TestSound(SelectorSuite, MeasuringTests, ScoringTests):
    """Without a fault there is nothing to catch."""

    create: Any = Sound


globals().update(proofs(TestSound, FAULTS))
