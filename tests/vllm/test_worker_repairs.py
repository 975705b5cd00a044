"""What a worker computes for repairs and audits, on a model of plain torch, and how it compares predictions."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blendhub import Span
from blendhub.core.errors import Unsupported
from blendhub.vllm.messages import RepairJob, RepairStates
from blendhub.vllm.model_support import ModelSupport
from blendhub.vllm.worker import repairs
from blendhub.vllm.worker.audit import MAX_KL, check_predictions, compared
from blendhub.vllm.worker.recompute import HostCopy
from blendhub.vllm.worker.repairs import Repairs
from blendhub.vllm.worker.request import WorkerRequest
from blendhub.vllm.worker.start.worker_start import with_audits
from tests.vllm.blending import context_of
from tests.vllm.stand_in_model import BLOCK
from tests.vllm.summing_model import STATE_BLOCK, VOCABULARY, SummingModel, predictions
from tests.vllm.two_ranks import ALONE

N, EXACT, ANSWER = 60, 10, 9
"""The lengths of a prompt, of its exact beginning, and of its answer."""
TOKENS = np.arange(1, N + ANSWER + 1, dtype=np.uint32)
SUMS = np.cumsum(TOKENS)


RUNNING, SHOWN, LIVE = 5, 6, 7
"""The blocks with states of recurrent layers."""
STALE = N + ANSWER, -1


def model_of(fails_behind: int = N + ANSWER) -> SummingModel:
    """A model that has computed the exact beginning."""
    model = SummingModel(-(-(N + ANSWER) // BLOCK), stale=-1)
    model.kv[:EXACT] = SUMS[:EXACT]
    model.states = {RUNNING: (EXACT, int(SUMS[EXACT - 1])), SHOWN: STALE, LIVE: STALE}
    model.fails_behind = fails_behind
    return model


class Worker:
    """What a worker does with the repairs of one request."""

    def __init__(self, model: SummingModel) -> None:
        self.repairs = Repairs(context_of(model))
        self.repair: repairs.Repair | None = None

    def step(self, job: RepairJob) -> None:
        if job.is_first:
            self.repair = self.repairs.begin(job.prompt_tokens, compares=job.compares)
        if self.repair:
            self.repairs.compute(self.repair, job)

    def take_result(self):
        if result := self.repair and self.repair.result():
            self.repair = None
        return result


def jobs(answer, spans, states: RepairStates | None = None, *, compares: bool = True):
    """A repair in these spans, of which the last one ends with the tokens that are known and computed."""
    of_states = [0] * ((N + ANSWER - 1) // STATE_BLOCK) + [LIVE]
    blocks = (np.arange(5), np.array(of_states)) if states else (np.arange(5),)
    tokens = np.append(TOKENS[:N], answer).astype(np.uint32)
    for number, span in enumerate(spans):
        yield RepairJob(
            request="r", span=span, tokens=tokens[span.start : span.end + 1], blocks=blocks, prompt_tokens=N,
            compares=compares, is_first=number == 0, asks=None, is_last=span is spans[-1],
            states=states,
        )  # fmt: skip


@st.composite
def parts(draw):
    """The spans of a repair, step by step."""
    ends = sorted(draw(st.sets(st.integers(EXACT + 1, N + ANSWER - 1), max_size=5)) | {N + ANSWER})
    return [Span(start, end) for start, end in zip([EXACT, *ends], ends, strict=False)]


@given(
    parts(),
    st.lists(st.integers(0, VOCABULARY - 1), min_size=ANSWER, max_size=ANSWER),
    st.integers(1, 4),
    st.booleans(),
)
def test_a_repair_leaves_exact_kv_and_tells_which_tokens_of_the_answer_the_model_would_not_say(
    spans, answer, rows, is_greedy
):
    worker = Worker(model := model_of())
    tokens = np.append(TOKENS[:N], answer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repairs, "ROWS", rows)
        for job in jobs(answer, spans, compares=is_greedy):
            assert not worker.take_result()
            worker.step(job)
    exact = np.cumsum(tokens)
    assert np.array_equal(model.kv[: N + ANSWER], exact)
    likeliest = predictions(exact[N - 1 : -1]).argmax(1).numpy()
    result = worker.take_result()
    assert (result.tokens, result.compared) == (N + ANSWER - EXACT, ANSWER if is_greedy else 0)
    assert list(result.differing) == (np.flatnonzero(likeliest != answer).tolist() if is_greedy else [])
    assert result.audit is None and not worker.take_result()


def test_a_repair_has_ended_when_the_device_has_computed_numbers_of_any_kind():
    """NumPy knows no bfloat16, in which most models compute."""
    record = WorkerRequest("r")
    record.repaired = HostCopy(torch.ones(1, 1, dtype=torch.bfloat16))
    assert not record.is_repairing and record.repaired is None


@given(parts(), st.integers(0, 5), st.integers(EXACT, N + ANSWER))
def test_with_recurrent_layers_the_answer_goes_on_from_the_state_of_the_repair_once_all_is_exact(spans, at, fails_at):
    """``at``: the span with whose end a state is shown; ``fails_at``: the last token that the model computes."""
    worker = Worker(model := model_of(fails_at))
    shown_end = spans[min(at, len(spans) - 1)].end
    states = RepairStates(running={1: RUNNING}, shown={1: SHOWN}, shown_end=shown_end)
    exact = np.cumsum(np.append(TOKENS[:N], [0] * ANSWER)).tolist()
    for job in jobs([0] * ANSWER, spans, states=states):
        assert model.states[LIVE] == STALE, "the answer goes on meanwhile"
        worker.step(job)
    is_done = fails_at >= N + ANSWER
    computed = max([EXACT, *(span.end for span in spans if span.end <= fails_at)])
    assert model.states[LIVE] == ((N + ANSWER, exact[-1]) if is_done else STALE)
    assert model.states[SHOWN] == ((shown_end, exact[shown_end - 1]) if shown_end <= computed else STALE)
    assert bool(worker.take_result().error) != is_done


@pytest.mark.parametrize("n_scheduled", [0, 1, 3])
def test_where_a_block_is_full_the_step_may_have_the_state_in_two(n_scheduled):
    """One runner copies it into the next block before the worker's step, and the other one behind that."""
    model, end = model_of(), 2 * STATE_BLOCK
    table = np.array([0, LIVE, 8][: -(-(end + n_scheduled) // STATE_BLOCK)])
    states = RepairStates(running={1: RUNNING}, shown={}, shown_end=0)
    repairs.hand_over_states(model, states, [np.arange(5), table], end)
    assert model.states[LIVE] == model.states[RUNNING]
    assert (model.states.get(8) == model.states[RUNNING]) == (n_scheduled > 0)
    repairs.hand_over_states(model, states, [np.arange(5), np.array([0, 0])], end)
    assert 0 not in model.states, "vLLM has freed the state of a request that has ended"


def test_a_repair_that_fails_is_over_and_the_next_one_of_the_request_is_not():
    worker = Worker(model_of())
    first, second = jobs([0] * ANSWER, [Span(EXACT, 30), Span(30, N + ANSWER)])
    worker.step(first)
    asleep = RuntimeError("vLLM has gone to sleep")
    worker.repairs.stop(asleep)
    worker.repair.fail(asleep)
    worker.step(second)
    assert "gone to sleep" in worker.take_result().error
    worker.step(second)  # the scheduler had not heard of it
    assert not worker.take_result()
    worker.step(first)
    assert "gone to sleep" in worker.take_result().error
    worker.repairs.stop(None)
    for job in (first, second):
        worker.step(job)
    assert worker.take_result().error == ""
    worker.step(first)
    worker.repair = None  # the scheduler has given it up
    worker.step(second)
    assert not worker.take_result()


logits = st.lists(st.floats(-30, 30, width=32), min_size=4, max_size=4)


@given(logits, logits)
def test_divergence_and_agreement_are_those_of_the_definition(blended, truth):
    agrees, kl = compared(torch.tensor(blended), torch.tensor(truth)).tolist()
    p, q = (np.exp(np.array(row) - np.logaddexp.reduce(row)) for row in (truth, blended))
    expected = sum(a * (math.log(a) - math.log(b)) for a, b in zip(p, q, strict=True) if a > 1e-30)
    assert kl == pytest.approx(expected, rel=1e-3, abs=1e-4) and kl >= 0
    if all(np.diff(np.sort(row))[-1] > 1e-3 for row in (blended, truth)):  # otherwise rounding decides
        assert agrees == (np.argmax(blended) == np.argmax(truth))


def test_predictions_that_cannot_be_compared_count_as_far_apart():
    none, truth = -math.inf, [0.0, 1.0, 2.0]
    for blended, true, kl in (
        ([0.0, 1.0, none], [0.0, 1.0, none], 0.0),
        ([0.0, 1.0, none], truth, MAX_KL),
        ([math.nan, 1.0, 0.0], truth, MAX_KL),
    ):
        assert float(compared(torch.tensor(blended), torch.tensor(true))[1]) == pytest.approx(kl, abs=1e-6)


def test_a_model_without_predictions_is_not_audited_and_the_log_says_why():
    support = ModelSupport((), True, ("one",))
    assert with_audits(support, model_of(), ALONE) == ModelSupport((), True, ("one",), audits=True)
    mute: Any = model_of()
    mute.logits = None
    without = with_audits(support, mute, ALONE)
    assert not without.audits and without.blends and "requests are not audited" in without.reasons[1]
    mute.forward = lambda chosen: (1, 2)
    with pytest.raises(Unsupported, match="tuple"):
        check_predictions(mute)
