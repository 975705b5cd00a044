"""A suite that nothing fails is worth nothing: selectors with one fault each, and the test that must see it."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blendhub import Span
from blendhub.contracts import Selection, Selector
from blendhub.testing import SelectorSuite
from tests.suite_runs import all_tests, passes

pytestmark = pytest.mark.slow


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


class SoundWithoutProbe(Sound):
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


class NeglectsWhatIsAttended(SoundByAttention):
    def ranked(self, question: Question) -> list[int]:
        return question.positions


class TakesBrokenAttentionForNone(SoundByAttention):
    def ranked(self, question: Question) -> list[int]:
        question.scores = np.nan_to_num(question.scores, nan=0, posinf=0, neginf=0)
        return super().ranked(question)


class NeedsAttention(SoundByAttention):
    def select(self, selection: Selection) -> list[Span]:
        assert selection.attended is not None
        return super().select(selection)


class PicksAllWithoutAttention(SoundByAttention):
    def select(self, selection: Selection) -> list[Span]:
        known = selection.attended is not None
        return super().select(selection) if known or not selection.ratio else list(selection.moved)


class AsksALayerBelowTheLast(SoundByAttention):
    attended_layers = (0.5, 1.0)


class HasNobodyAsk(SoundByAttention):
    attending_tokens = 0


class RoundsUpToBlocks(Sound):
    def limit(self, question: Question) -> int:
        return -(-super().limit(question) // question.block_tokens) * question.block_tokens


class SparesTheLast(Sound):
    def limit(self, question: Question) -> int:
        return min(super().limit(question), len(question.positions) - 1)


class AlwaysPicksOne(Sound):
    def limit(self, question: Question) -> int:
        return max(1, super().limit(question))


class AnswersInNumpy(Sound):
    def select(self, selection: Selection) -> list[Span]:
        int64: Any = np.int64
        return [Span(int64(span.start), int64(span.end)) for span in super().select(selection)]


class GivesUpAboveHalf(Sound):
    def limit(self, question: Question) -> int:
        return super().limit(question) // (2 if 0.5 < question.ratio < 1 else 1)


class ShufflesAnew(Sound):
    def ranked(self, question: Question) -> list[int]:
        return np.random.default_rng().permutation(question.positions).tolist()


class BreaksTiesByChance(Sound):
    """Each object by its own."""

    def __init__(self) -> None:
        self._random = np.random.default_rng()

    def ranked(self, question: Question) -> list[int]:
        finite = np.nan_to_num(question.scores, nan=np.inf, neginf=np.inf)
        return sorted(self._random.permutation(question.positions).tolist(), key=lambda at: -finite[at])


class RemembersHowOftenItWasAsked(SoundWithoutProbe):
    asked = 0

    def ranked(self, question: Question) -> list[int]:
        self.asked += 1
        return question.positions[:: 1 if self.asked % 2 or question.ratio == 1 else -1]


class DependsOnTheHashSeed(SoundWithoutProbe):
    def ranked(self, question: Question) -> list[int]:
        return sorted(question.positions, key=lambda position: hash(str(position)))


class LovesLowScores(Sound):
    def ranked(self, question: Question) -> list[int]:
        return super().ranked(question)[::-1]


class TakesBrokenForEqual(Sound):
    def ranked(self, question: Question) -> list[int]:
        question.scores = np.nan_to_num(question.scores, nan=0, posinf=0, neginf=0)
        return super().ranked(question)


class LooksAtTheWholePrompt(Sound):
    def ranked(self, question: Question) -> list[int]:
        far = np.abs(np.nan_to_num(question.scores, nan=1e9) - np.nan_to_num(question.scores, nan=1e9).mean())
        return sorted(question.positions, key=lambda position: -far[position])


class CleansTheCallersScores(Sound):
    def ranked(self, question: Question) -> list[int]:
        question.scores.flags.writeable = True
        question.scores[~np.isfinite(question.scores)] = np.finfo(np.float32).max
        return super().ranked(question)


class ForgetsTheTokens(SoundWithoutProbe):
    def select(self, selection: Selection) -> list[Span]:
        selection.tokens.flags.writeable = True
        selection.tokens[:] = 0
        return super().select(selection)


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


class ProbesTwiceOfAll(Sound):
    probe_share = 2.0


class ScoresWithoutAProbe(SoundWithoutProbe):
    score = Sound.score


class SeesNoDifference(Sound):
    def score(self, fresh: Any, stored: Any) -> Any:
        return super().score(fresh, fresh)


class SeesDifferencesEverywhere(Sound):
    def score(self, fresh: Any, stored: Any) -> Any:
        return super().score(fresh, stored) + 1


IN_ORDER = "test_picks_are_in_order_and_within_the_budget"
FAULTS = [
    (ProbesTheLastLayer, "test_the_probe_layer_is_a_layer"),
    (ProbesTwiceOfAll, "test_the_probe_share_is_a_share"),
    (ScoresWithoutAProbe, "test_without_a_probe_there_is_no_score"),
    (SeesNoDifference, "test_kv_that_differs_has_a_score"),
    (SeesDifferencesEverywhere, "test_equal_kv_has_the_score_0"),
    (RoundsUpToBlocks, IN_ORDER),
    (RoundsUpToBlocks, "test_any_moved_spans"),
    (SparesTheLast, IN_ORDER),
    (AlwaysPicksOne, IN_ORDER),
    (AnswersInNumpy, IN_ORDER),
    (GivesUpAboveHalf, "test_a_larger_ratio_never_picks_fewer"),
    (ShufflesAnew, "test_two_instances_agree"),
    (BreaksTiesByChance, "test_equal_scores_are_decided_alike_by_every_object"),
    (RemembersHowOftenItWasAsked, "test_what_was_asked_before_does_not_matter"),
    (DependsOnTheHashSeed, "test_a_process_with_another_hash_seed_agrees"),
    (LovesLowScores, "test_more_is_picked_where_scores_are_high"),
    (TakesBrokenForEqual, "test_scores_that_are_not_finite_are_all_the_same"),
    (LooksAtTheWholePrompt, "test_scores_outside_of_what_moved_mean_nothing"),
    (CleansTheCallersScores, "test_arguments_are_not_changed"),
    (ForgetsTheTokens, "test_arguments_are_not_changed"),
    (NeglectsWhatIsAttended, "test_more_is_picked_where_scores_are_high"),
    (TakesBrokenAttentionForNone, "test_scores_that_are_not_finite_are_all_the_same"),
    (NeedsAttention, "test_it_decides_without_attention_that_cannot_be_measured"),
    (PicksAllWithoutAttention, "test_it_decides_without_attention_that_cannot_be_measured"),
    (AsksALayerBelowTheLast, "test_the_layers_whose_attention_is_measured_are_fractions"),
    (HasNobodyAsk, "test_at_least_one_token_asks"),
    (AveragesHeads, "test_ranks_may_add_up_their_scores"),
    (OverflowsInHalfPrecision, "test_large_values_of_half_precision_do_not_overflow"),
    (ComparesNorms, "test_one_float32_a_token"),
    (LooksWhetherItIsZero, "test_no_value_is_waited_for"),
    (SubtractsInPlace, "test_tensors_are_not_changed"),
]


def suite_of(fault: str) -> type[SelectorSuite]:
    class Suite(SelectorSuite):
        def create(self) -> Selector:
            return globals()[fault]()

    return Suite


def test_a_faulty_selector_proves_each_test() -> None:
    assert {test for _, test in FAULTS} == all_tests(SelectorSuite)


@pytest.mark.parametrize("sound", ["Sound", "SoundWithoutProbe", "SoundByAttention"])
def test_without_a_fault_there_is_nothing_to_catch(sound: str, tmp_path: Path) -> None:
    assert passes(__name__, sound, "", tmp_path)


@pytest.mark.usefixtures("without_shrinking")
@pytest.mark.parametrize("faulty, test", FAULTS, ids=lambda value: getattr(value, "__name__", value))
def test_suite_catches(faulty: type[Sound], test: str, tmp_path: Path) -> None:
    assert not passes(__name__, faulty.__name__, test, tmp_path), f"{test} lets {faulty.__name__} pass"
