"""The start-up checks on two ranks that compute each forward together: one of them fails a check, and both go on."""

import pytest

from blendhub.vllm.model.checks.model_check import check_model, groups_and_rotations
from tests.stand_in import StandIn
from tests.vllm.stand_in_model import StandInModel
from tests.vllm.two_ranks import ENDED, forward_together, on_two_ranks

pytestmark = pytest.mark.slow


class Misplacing(StandInModel):
    def write(self, index, keys, values, slots):
        super().write(index, keys, values, slots.roll(1))


class NotWriting(StandInModel):
    def write(self, index, keys, values, slots):
        raise RuntimeError("no kernel image")


class DifferentInParts(StandInModel):
    def computed(self, index, chosen, positions=None):
        keys, values = super().computed(index, chosen, positions)
        return keys + 0.1 * (len(chosen.spans) - 1), values


class DifferentInProbes(StandInModel):
    def forward_until(self, layer, chosen):
        keys, values = super().forward_until(layer, chosen)
        return keys, values + 0.1


class FailingInProbes(StandInModel):
    def forward_until(self, layer, chosen):
        super().forward_until(layer, chosen)
        raise RuntimeError("CUDA error")


class LearnedPositions(StandInModel):
    def computed(self, index, chosen, positions=None):
        keys, values = super().computed(index, chosen, positions)
        return keys * (1.0 if positions is None else 1.0 + float(positions[0])), values


class OtherRotary(StandInModel):
    def __init__(self, together):
        super().__init__(together, base=500.0)


PROBING = StandIn(probe_layer=1, attended_layers=())
"""A selector."""


def on_rank_1(kind):
    def work(ranks):
        model = (kind if ranks.number else StandInModel)(forward_together)
        groups, candidates = groups_and_rotations(model, 256)
        check = check_model(model, groups, candidates, PROBING, ranks)
        return check.support.layouts != (), check.support.blends, check.support.reasons, len(check.rotations)

    return work


REUSED = "; exact prefixes are reused all the same"


@pytest.mark.parametrize(
    "kind, reuses, sentence",
    [
        (Misplacing, False, "keys are not where BlendHub expects them"),
        (NotWriting, False, "writing into the pages, and reading back, failed: RuntimeError: no kernel image"),
        (DifferentInParts, True, "tokens computed in parts are off by"),
        (DifferentInProbes, True, "the probed KV is off by"),
        (FailingInProbes, True, "a forward over chosen tokens failed: RuntimeError: CUDA error"),
        (LearnedPositions, True, "rotated to another position they are off by"),
    ],
)
def test_a_check_that_fails_on_one_rank_fails_on_both_and_the_rank_is_named(kind, reuses, sentence):
    for found in on_two_ranks(on_rank_1(kind)):
        has_layout, blends, (reason,), n_rotations = found
        assert (has_layout, blends, n_rotations) == (reuses, False, 0)
        assert sentence in reason and "(rank 1 of 2)" in reason and reason.endswith(REUSED) == reuses


def test_ranks_of_a_model_that_blends_choose_the_same_rotations():
    for has_layout, blends, reasons, n_rotations in on_two_ranks(on_rank_1(StandInModel)):
        assert (has_layout, blends, reasons, n_rotations) == (True, True, (), 2)


def test_a_selector_that_asks_what_is_attended_to_picks_without_it_where_a_rank_cannot_measure_it(monkeypatch):
    monkeypatch.setattr(PROBING, "attended_layers", (0.5,))
    for has_layout, blends, (reason,), n_rotations in on_two_ranks(on_rank_1(StandInModel)):
        assert (has_layout, blends, n_rotations) == (True, True, 2)
        assert "picks without knowing what the end of a prompt attends to" in reason


def test_ranks_with_different_rotary_embeddings_move_no_keys():
    for _, blends, (reason,), _ in on_two_ranks(on_rank_1(OtherRotary)):
        assert not blends and "rotary embeddings" in reason and reason.endswith(REUSED)


class FailingBeforeAForward(StandInModel):
    def forward(self, *given, **named):
        raise RuntimeError("out of memory")


def test_a_rank_that_leaves_the_others_in_a_forward_ends_the_engine_with_a_sentence():
    _, (ended, sentence) = on_two_ranks(on_rank_1(FailingBeforeAForward), patience_s=1.0)
    assert ended == ENDED and "rank 1 of 2 waited for the other ranks" in sentence
