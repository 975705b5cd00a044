"""What a worker computes for an audit, on a model of plain torch, and how it compares predictions."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blendhub import PluginHost, Span
from blendhub.core.errors import Unsupported
from blendhub.core.layout import KVLayout
from blendhub.core.spans import Match
from blendhub.vllm.decision import Decision
from blendhub.vllm.messages import AuditedAnswer, LoadResult, WorkerReport
from blendhub.vllm.model.recompute_set import positions_of
from blendhub.vllm.model_support import ModelSupport
from blendhub.vllm.worker.audit import MOST_KL, check_predictions, compare, inexact
from blendhub.vllm.worker.recompute import Blend, BlendContext
from blendhub.vllm.worker.worker_start import with_audits
from tests.stand_in import Anything, StandIn
from tests.vllm.blending import ONE_TOKEN, load_job, to_the_end
from tests.vllm.two_ranks import ALONE

LAYOUT = KVLayout(layers=1, kv_heads=1, key_dim=4, value_dim=4, dtype="float32", chunk_tokens=32)
HOST = PluginHost.discover()
BLOCK = 16


class SummingModel(Anything):
    """A token's KV is the sum of all tokens up to it: it depends on the whole context, and shows what is stale."""

    block_sizes, max_tokens, max_spans = (BLOCK,), 4096, 64

    def __init__(self, n: int, says: bool = True) -> None:
        self.kv = np.zeros(-(-n // BLOCK) * BLOCK)
        self.batches: list[list[Span]] = []
        self._says = says

    def forward(self, chosen):
        (part,) = chosen.parts
        self.batches.append(list(part.spans))
        for position in sorted(chosen.positions):
            self.kv[position] = part.tokens[position] + (self.kv[position - 1] if position else 0)
        return torch.from_numpy(self.kv[chosen.positions]).reshape(-1, 1)

    def logits(self, hidden):
        return torch.stack([hidden[:, 0] % 7, hidden[:, 0] % 5], 1) if self._says else None


def blended(model, decision, n, budget=1000, answer=ONE_TOKEN) -> tuple[Blend, list[int]]:
    """The load of a request that was blended and audited, and the cost of each of its steps."""
    context = BlendContext(model, [], (), StandIn(block_tokens=1), HOST.create("selector", "first_k"), ALONE)
    tokens = np.arange(1, n + 1, dtype=np.uint32)
    blend = Blend(context, load_job("r", tokens, (np.arange(-(-n // BLOCK)),), decision, answer))
    return blend, to_the_end(context, [blend], budget)


def moved(start: int, end: int) -> Match:
    return Match(Span(start, end), start, 1000, False)


@pytest.mark.parametrize("budget", [1000, 7, 1])
def test_an_audit_predicts_from_blended_kv_and_leaves_exact_kv(budget):
    n = 60
    expected = np.cumsum(np.arange(1, n + 1))
    model = SummingModel(n)
    model.kv[:10] = expected[:10]  # exact
    model.kv[10:40] = -1.0  # moved: computed in another context
    decision = Decision(0, 40, (Match(Span(0, 10), 1, 0, True), moved(10, 40)), 0.0, audit=True)
    blend, costs = blended(model, decision, n, budget=budget)
    assert np.array_equal(model.kv[:n], expected)
    # Nothing was recomputed, so the tail is a sum that begins at the last moved token.
    stale = -1.0 + sum(range(41, n + 1))
    given_, truth = (torch.tensor([[s % 7, s % 5]]) for s in (stale, float(expected[-1])))
    assert blend.result.audit == compare(given_, truth)
    assert blend.result.recomputed == () and blend.result.holes == 0
    assert sum(costs) == (n - 40) + (n - 10) and max(costs) <= budget


@pytest.mark.parametrize("budget", [1000, 7, 1])
@pytest.mark.parametrize("stale", range(-9, -1))
def test_an_audit_of_several_tokens_follows_blended_kv_and_asks_exact_kv_about_each(stale, budget):
    n, model = 60, SummingModel(60)
    exact = np.cumsum(np.arange(1, n + 1))
    model.kv[:40] = stale
    decision = Decision(0, 40, (moved(0, 40),), 0.0, audit=True)
    blend, costs = blended(model, decision, n, budget, AuditedAnswer(5))
    assert np.array_equal(model.kv[:n], exact)
    sums = {"given": stale + sum(range(41, n + 1)), "truth": exact[-1]}
    said = []
    for _ in range(5):
        likely = {name: int(total % 5 > total % 7) for name, total in sums.items()}
        said.append(likely)
        sums = {name: total + likely["given"] for name, total in sums.items()}
    alike = [one["given"] == one["truth"] for one in said]
    agreed = [*alike, False].index(False)
    found = blend.result.audit
    assert (found.tokens, found.agreed_tokens, found.agrees) == (5, agreed, all(alike))
    # Four of the answer's tokens are computed twice; the first time each in a step.
    assert sum(costs) == (n - 40) + 4 + (n + 4) and max(costs) <= budget
    assert len(costs) >= 4


def test_an_audit_compares_nothing_behind_a_token_that_ends_the_answer():
    decision = Decision(0, 40, (moved(0, 40),), 0.0, audit=True)
    for stop_tokens, compared in (({0, 1}, 1), ({7}, 5)):
        blend, _ = blended(SummingModel(60), decision, 60, answer=AuditedAnswer(5, frozenset(stop_tokens)))
        assert blend.result.audit.tokens == compared


def test_a_rank_without_predictions_computes_the_same_and_reports_no_outcome():
    decision = Decision(0, 40, (moved(0, 40),), 0.0, audit=True)
    silent, telling = SummingModel(60, says=False), SummingModel(60)
    blend, costs = blended(silent, decision, 60)
    other, other_costs = blended(telling, decision, 60)
    assert blend.result.audit is None and other.result.audit is not None
    assert silent.batches == telling.batches and costs == other_costs
    for reports in ([blend, other], [other, blend]):
        first, second = (WorkerReport(loads={"r": one.result}) for one in reports)
        assert first.aggregate(second).loads["r"].audit == other.result.audit
    failed = WorkerReport(loads={"r": LoadResult(error="no")})
    told = WorkerReport(loads={"r": other.result})
    assert failed.aggregate(told).loads["r"].error == told.aggregate(failed).loads["r"].error == "no"


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9), st.booleans()), min_size=1, max_size=9), st.data())
def test_all_that_is_not_exact_is_computed_anew_from_the_first_moved_token_on(pieces, data):
    matches, at = [], 0
    for gap, length, exact in pieces:
        matches.append(Match(Span(at + gap, at + gap + length), at, 500, exact))
        at += gap + length
    decision = Decision(data.draw(st.integers(0, matches[-1].span.end - 1)), at, tuple(matches), 0.0, audit=True)
    n = at + data.draw(st.integers(1, 5))
    if not decision.moved:
        return
    exact = {p for span in decision.exact for p in range(span.start, span.end)}
    expected = [p for p in range(decision.first_approximate, n) if p not in exact]
    assert positions_of(inexact(decision, n)).tolist() == expected


logits = st.lists(st.floats(-30, 30, width=32), min_size=4, max_size=4)


@given(logits, logits)
def test_divergence_and_agreement_are_those_of_the_definition(given_, truth):
    outcome = compare(torch.tensor([given_]), torch.tensor([truth]))
    p, q = (np.exp(np.array(one) - np.logaddexp.reduce(one)) for one in (truth, given_))
    expected = sum(a * (math.log(a) - math.log(b)) for a, b in zip(p, q, strict=True) if a > 1e-30)
    assert outcome.kl == pytest.approx(expected, rel=1e-3, abs=1e-4) and outcome.kl >= 0
    if all(np.diff(np.sort(one))[-1] > 1e-3 for one in (given_, truth)):  # otherwise rounding decides
        assert outcome.agrees == (np.argmax(given_) == np.argmax(truth))


@pytest.mark.parametrize(
    ("given_", "truth", "kl"),
    [
        ([0.0, 1.0, -math.inf], [0.0, 1.0, -math.inf], 0.0),
        ([0.0, 1.0, -math.inf], [0.0, 1.0, 2.0], MOST_KL),
        ([math.nan, 1.0, 0.0], [0.0, 1.0, 2.0], MOST_KL),
    ],
    ids=["a token that both rule out", "a token that blended KV alone rules out", "no number"],
)
def test_predictions_that_cannot_be_compared_count_as_far_apart(given_, truth, kl):
    assert compare(torch.tensor([given_]), torch.tensor([truth])).kl == pytest.approx(kl, abs=1e-6)


def test_a_model_without_predictions_is_not_audited_and_the_log_says_why():
    class Mute(SummingModel):
        def logits(self, hidden):
            raise AttributeError("compute_logits")

    support = ModelSupport((LAYOUT,), True, ("one",))
    assert with_audits(support, SummingModel(16), ALONE) == ModelSupport((LAYOUT,), True, ("one",), audits=True)
    without = with_audits(support, Mute(16), ALONE)
    assert not without.audits and without.blends
    assert "requests are not audited" in without.reasons[1] and "compute_logits" in without.reasons[1]
    with pytest.raises(Unsupported, match="tuple"):
        check_predictions(StandIn(block_sizes=(16,), forward=lambda chosen: (1, 2)))
