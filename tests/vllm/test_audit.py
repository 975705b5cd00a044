"""What a worker computes for an audit, on a model of plain torch, and how it compares predictions."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from blendhub import Span
from blendhub.core.errors import Unsupported
from blendhub.core.spans import Match
from blendhub.vllm.decision import Decision
from blendhub.vllm.messages import AuditedAnswer
from blendhub.vllm.model.recompute_set import positions_of
from blendhub.vllm.model_support import ModelSupport
from blendhub.vllm.worker.audit import MOST_KL, check_predictions, compare, inexact
from blendhub.vllm.worker.recompute import Blend
from blendhub.vllm.worker.worker_start import with_audits
from tests.vllm.blending import ONE_TOKEN, context_of, load_job, to_the_end
from tests.vllm.stand_in_model import StandInModel
from tests.vllm.two_ranks import ALONE

N, EXACT, MOVED = 60, 10, 40
"""The lengths of a prompt, of its exact prefix, and of that with the moved text behind it."""
TOKENS = np.arange(1, N + 1, dtype=np.uint32)
DECISION = Decision(
    0, MOVED, (Match(Span(0, EXACT), 1, 0, True), Match(Span(EXACT, MOVED), 2, 1000, False)), 0.0, audit=True
)


class SummingModel(StandInModel):
    """A token's KV is the sum of all tokens up to it: it depends on the whole context, and shows what is stale."""

    def __init__(self, says: bool = True, stale: int = -1) -> None:
        super().__init__()
        self.kv = np.zeros(N + 4)
        self.kv[:EXACT] = np.cumsum(TOKENS)[:EXACT]
        self.kv[EXACT:MOVED] = stale
        self.batches: list[list[Span]] = []
        self._says = says

    def forward(self, chosen, *, positions=None):
        (part,) = chosen.parts
        self.batches.append(list(part.spans))
        for position in sorted(chosen.positions):
            self.kv[position] = part.tokens[position] + (self.kv[position - 1] if position else 0)
        return torch.from_numpy(self.kv[chosen.positions]).reshape(-1, 1)

    def logits(self, hidden):
        return torch.stack([hidden[:, 0] % 7, hidden[:, 0] % 5], 1) if self._says else None


def audited(model, budget=1000, answer=ONE_TOKEN):
    """The outcome of an audit, and the cost of each of its steps."""
    context = context_of(model)
    blend = Blend(context, load_job(TOKENS, DECISION, answer=answer))
    costs = to_the_end(context, [blend], budget)
    assert blend.result.recomputed == () and blend.result.holes == 0
    return blend.result.audit, costs


@pytest.mark.parametrize("budget", [1000, 7, 1])
@pytest.mark.parametrize("n_tokens", [1, 5])
@pytest.mark.parametrize("stale", [-9, -5, -2])
def test_an_audit_follows_blended_kv_asks_exact_kv_about_each_token_and_leaves_exact_kv(stale, n_tokens, budget):
    model, exact = SummingModel(stale=stale), np.cumsum(TOKENS)
    outcome, costs = audited(model, budget, AuditedAnswer(n_tokens))
    assert np.array_equal(model.kv[:N], exact)
    # Of the tail alone blended KV is computed: a sum that begins at the last moved token.
    sums = np.array([stale + sum(range(MOVED + 1, N + 1)), exact[-1]])
    agree = []
    for _ in range(n_tokens):
        blended, true = (sums % 5 > sums % 7).astype(int)
        agree.append(blended == true)
        sums += blended
    agreed = [*agree, False].index(False)
    assert (outcome.tokens, outcome.agreed_tokens, outcome.agrees) == (n_tokens, agreed, all(agree))
    # All but the last of the answer's tokens are computed twice; the first time each in a step.
    assert sum(costs) == (N - MOVED) + (N - EXACT) + 2 * (n_tokens - 1) and max(costs) <= budget
    assert len(costs) >= n_tokens - 1


def test_an_audit_compares_nothing_behind_a_token_that_ends_the_answer():
    for stop_tokens, compared in (({0, 1}, 1), ({7}, 5)):
        outcome, _ = audited(SummingModel(), answer=AuditedAnswer(5, frozenset(stop_tokens)))
        assert outcome.tokens == compared


def test_a_rank_without_predictions_computes_the_same_and_reports_no_outcome():
    silent, telling = SummingModel(says=False), SummingModel()
    assert audited(silent)[0] is None and audited(telling)[0] is not None
    assert silent.batches == telling.batches


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9), st.booleans()), min_size=1, max_size=9), st.data())
def test_all_that_is_not_exact_is_computed_anew_from_the_first_moved_token_on(pieces, data):
    matches, at = [], 0
    for gap, length, exact in pieces:
        matches.append(Match(Span(at + gap, at + gap + length), at, 500, exact))
        at += gap + length
    decision = Decision(data.draw(st.integers(0, matches[-1].span.end - 1)), at, tuple(matches), 0.0, audit=True)
    assume(decision.moved)
    exact = set(positions_of(decision.exact).tolist()) if decision.exact else set()
    n = at + data.draw(st.integers(1, 5))
    expected = [position for position in range(decision.first_approximate, n) if position not in exact]
    assert positions_of(inexact(decision, n)).tolist() == expected


logits = st.lists(st.floats(-30, 30, width=32), min_size=4, max_size=4)


@given(logits, logits)
def test_divergence_and_agreement_are_those_of_the_definition(blended, truth):
    outcome = compare(torch.tensor([blended]), torch.tensor([truth]))
    p, q = (np.exp(np.array(row) - np.logaddexp.reduce(row)) for row in (truth, blended))
    expected = sum(a * (math.log(a) - math.log(b)) for a, b in zip(p, q, strict=True) if a > 1e-30)
    assert outcome.kl == pytest.approx(expected, rel=1e-3, abs=1e-4) and outcome.kl >= 0
    if all(np.diff(np.sort(row))[-1] > 1e-3 for row in (blended, truth)):  # otherwise rounding decides
        assert outcome.agrees == (np.argmax(blended) == np.argmax(truth))


def test_predictions_that_cannot_be_compared_count_as_far_apart():
    none, truth = -math.inf, [0.0, 1.0, 2.0]
    for blended, true, kl in (
        ([0.0, 1.0, none], [0.0, 1.0, none], 0.0),
        ([0.0, 1.0, none], truth, MOST_KL),
        ([math.nan, 1.0, 0.0], truth, MOST_KL),
    ):
        assert compare(torch.tensor([blended]), torch.tensor([true])).kl == pytest.approx(kl, abs=1e-6)


def test_a_model_without_predictions_is_not_audited_and_the_log_says_why():
    support = ModelSupport((), True, ("one",))
    assert with_audits(support, SummingModel(), ALONE) == ModelSupport((), True, ("one",), audits=True)
    mute: Any = SummingModel()
    mute.logits = None
    without = with_audits(support, mute, ALONE)
    assert not without.audits and without.blends and "requests are not audited" in without.reasons[1]
    mute.forward = lambda chosen: (1, 2)
    with pytest.raises(Unsupported, match="tuple"):
        check_predictions(mute)
