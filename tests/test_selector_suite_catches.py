"""Selectors with one fault each, and the test of the suites that must see it."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np
import pytest

from blendhub import Span
from blendhub.contracts import Selection, Selector
from blendhub.testing import SelectorSuite
from blendhub.testing.selectors import MeasuringTests, ScoringTests
from tests.suite_runs import all_tests, proofs

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("without_shrinking")]


@dataclass
class Question:
    """What most of these selectors look at of a selection."""

    moved: Sequence[Span]
    ratio: float
    block_tokens: int
    scores: Any

    @property
    def positions(self) -> list[int]:
        return [position for span in self.moved for position in range(span.start, span.end)]


class Sound(Selector):
    """The tokens with the highest scores, one by one: slow, plain, and without a fault."""

    probe_layer = 1

    def score(self, fresh: Any, stored: Any) -> Any:
        return sum((new.float() - old.float()).square().sum((1, 2)) for new, old in zip(fresh, stored, strict=True))

    def select(self, selection: Selection) -> list[Span]:
        question = Question(selection.moved, selection.ratio, selection.block_tokens, selection.scores)
        return [Span(at, at + 1) for at in sorted(self.ranked(question)[: self.limit(question)])]

    def limit(self, question: Question) -> int:
        return ceil(question.ratio * len(question.positions))

    def ranked(self, question: Question) -> list[int]:
        finite = np.nan_to_num(question.scores, nan=np.inf, neginf=np.inf)
        return sorted(question.positions, key=lambda position: -finite[position])


class SoundWithoutNumbers(Sound):
    """The first tokens of the prompt that moved."""

    probe_layer = 0
    score = Selector.score

    def ranked(self, question: Question) -> list[int]:
        return question.positions


class SoundByAttention(Sound):
    """The tokens that are attended to most."""

    probe_layer = 0
    attended_layers: tuple[float, ...] = (0.5,)
    score = Selector.score

    def select(self, selection: Selection) -> list[Span]:
        numbers = np.zeros(len(selection.tokens)) if selection.attended is None else selection.attended
        question = Question(selection.moved, selection.ratio, selection.block_tokens, numbers)
        return [Span(at, at + 1) for at in sorted(self.ranked(question)[: self.limit(question)])]


class PicksAllWithoutAttention(SoundByAttention):
    def select(self, selection: Selection) -> list[Span]:
        measured = selection.attended is not None
        return super().select(selection) if measured or not selection.ratio else list(selection.moved)


class AsksALayerBelowTheLast(SoundByAttention):
    attended_layers = (0.5, 1.0)


class RoundsUpToBlocks(Sound):
    def limit(self, question: Question) -> int:
        return -(-super().limit(question) // question.block_tokens) * question.block_tokens


class AnswersInNumpy(Sound):
    def select(self, selection: Selection) -> list[Span]:
        int64: Any = np.int64
        return [Span(int64(span.start), int64(span.end)) for span in super().select(selection)]


class ShufflesAnew(Sound):
    def ranked(self, question: Question) -> list[int]:
        return np.random.default_rng().permutation(question.positions).tolist()


class RemembersHowOftenItWasAsked(SoundWithoutNumbers):
    asked = 0

    def ranked(self, question: Question) -> list[int]:
        self.asked += 1
        return question.positions[:: 1 if self.asked % 2 or question.ratio == 1 else -1]


class DependsOnTheHashSeed(SoundWithoutNumbers):
    def ranked(self, question: Question) -> list[int]:
        return sorted(question.positions, key=lambda position: hash(str(position)))


class LovesLowScores(Sound):
    def ranked(self, question: Question) -> list[int]:
        return super().ranked(question)[::-1]


class LooksAtTheWholePrompt(Sound):
    def ranked(self, question: Question) -> list[int]:
        far = np.abs(np.nan_to_num(question.scores, nan=1e9) - np.nan_to_num(question.scores, nan=1e9).mean())
        return sorted(question.positions, key=lambda position: -far[position])


class CleansTheCallersScores(Sound):
    def ranked(self, question: Question) -> list[int]:
        question.scores.flags.writeable = True
        question.scores[~np.isfinite(question.scores)] = np.finfo(np.float32).max
        return super().ranked(question)


class AveragesHeads(Sound):
    def score(self, fresh: Any, stored: Any) -> Any:
        return super().score(fresh, stored) / fresh[0].shape[1]


class OverflowsInHalfPrecision(Sound):
    def score(self, fresh: Any, stored: Any) -> Any:
        return sum((new - old).square().sum((1, 2)) for new, old in zip(fresh, stored, strict=True)).float()


class ComparesNorms(Sound):
    def score(self, fresh: Any, stored: Any) -> Any:
        nothing = [0 * old for old in stored]
        return super().score(fresh, nothing) - super().score(stored, nothing)


class LooksWhetherItIsZero(Sound):
    def score(self, fresh: Any, stored: Any) -> Any:
        score = super().score(fresh, stored)
        return score if score.any() else score * 0


class SubtractsInPlace(Sound):
    def score(self, fresh: Any, stored: Any) -> Any:
        score = super().score(fresh, stored)
        fresh[0].sub_(stored[0])
        return score


class ProbesTheLastLayer(Sound):
    probe_layer = -1


class SeesDifferencesEverywhere(Sound):
    def score(self, fresh: Any, stored: Any) -> Any:
        return super().score(fresh, stored) + 1


WITHOUT_NUMBERS = [
    (RemembersHowOftenItWasAsked, "test_what_was_asked_before_does_not_matter"),
    (DependsOnTheHashSeed, "test_a_process_with_another_hash_seed_agrees"),
]
BY_ATTENTION = [
    (AsksALayerBelowTheLast, "test_what_it_asks_to_have_measured_is_within_bounds"),
    (PicksAllWithoutAttention, "test_it_decides_without_attention_that_cannot_be_measured"),
]
BY_SCORES = [
    (ProbesTheLastLayer, "test_what_it_asks_to_have_measured_is_within_bounds"),
    (RoundsUpToBlocks, "test_any_moved_spans"),
    (AnswersInNumpy, "test_any_moved_spans"),
    (ShufflesAnew, "test_what_was_asked_before_does_not_matter"),
    (CleansTheCallersScores, "test_arguments_are_not_changed"),
    (LovesLowScores, "test_more_is_picked_where_numbers_are_high"),
    (LooksAtTheWholePrompt, "test_numbers_outside_of_what_moved_mean_nothing"),
    (ComparesNorms, "test_one_float32_a_token"),
    (SeesDifferencesEverywhere, "test_only_kv_that_differs_has_a_score"),
    (AveragesHeads, "test_ranks_may_add_up_their_scores"),
    (OverflowsInHalfPrecision, "test_large_values_of_half_precision_do_not_overflow"),
    (LooksWhetherItIsZero, "test_tensors_are_neither_changed_nor_waited_for"),
    (SubtractsInPlace, "test_tensors_are_neither_changed_nor_waited_for"),
]


class TestSoundWithoutNumbers(SelectorSuite):
    """Without a fault there is nothing to catch."""

    plugin: type[Selector] = SoundWithoutNumbers

    def create(self) -> Selector:
        return self.plugin()


class TestSoundByAttention(TestSoundWithoutNumbers, MeasuringTests):
    plugin: type[Selector] = SoundByAttention
    test_a_process_with_another_hash_seed_agrees = None


class TestSound(TestSoundByAttention, ScoringTests):
    plugin = Sound


globals().update(proofs(TestSoundWithoutNumbers, WITHOUT_NUMBERS))
globals().update(proofs(TestSoundByAttention, BY_ATTENTION))
globals().update(proofs(TestSound, BY_SCORES))


def test_a_faulty_selector_proves_each_test() -> None:
    assert {test for _, test in (*WITHOUT_NUMBERS, *BY_ATTENTION, *BY_SCORES)} == all_tests(TestSound)
