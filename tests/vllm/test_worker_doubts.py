"""For which tokens a worker holds the step, on a model of plain torch, and what is sampled then."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blendhub import Span
from blendhub.outcome.report import AuditOutcome
from blendhub.vllm.messages import DoubtJob, RepairStates
from blendhub.vllm.model.sampling import Sampling
from blendhub.vllm.worker.audit import compared
from blendhub.vllm.worker.doubts import Doubts, Watch
from blendhub.vllm.worker.repairs import Repair, Repairs
from tests.vllm.blending import context_of
from tests.vllm.stand_in_model import BLOCK
from tests.vllm.summing_model import STATE_BLOCK, VOCABULARY, SummingModel, predictions

MARGIN = 0.5
STALE = -1000
RUNNING, SHOWN, LIVE = 100, 200, 300
"""The numbers of the blocks with states of the first request."""


class Rows(Sampling):
    """What a runner has for its sampler."""

    def __init__(self, names: list[str], logits: torch.Tensor, last: list[int]) -> None:
        super().__init__(logits)
        self._names, self._last = names, last
        self.n_processed = 0

    def rows(self, requests):
        return [self._names.index(name) if name in self._names else None for name in requests]

    def last_tokens(self, rows):
        return [self._last[row] for row in rows]

    def processed(self):
        self.n_processed += 1
        return self.logits


class Worker:
    """A worker with requests of so many tokens, each in blocks of its own, of which the first ``exact`` are exact."""

    def __init__(self, lengths: list[int], exact: int = 3, *, is_recurrent: bool = False) -> None:
        n_blocks = [-(-length // BLOCK) for length in lengths]
        ends = np.cumsum(n_blocks)
        self.model = SummingModel(int(ends[-1]), STALE)
        self.model.max_tokens, self.model.max_spans = 16, 2
        self.blocks = [np.arange(end - n, end) for end, n in zip(ends, n_blocks, strict=True)]
        self.tokens = [np.arange(1, n + 1, dtype=np.uint32) * (3 + number) for number, n in enumerate(lengths)]
        self.sums = [np.cumsum(tokens).astype(np.int64) for tokens in self.tokens]
        self.exact = exact
        for blocks, sums in zip(self.blocks, self.sums, strict=True):
            self.model.kv[blocks[0] * BLOCK :][:exact] = sums[:exact]
        for number, sums in enumerate(self.sums if is_recurrent else ()):
            self.model.states |= {RUNNING + number: (exact, int(sums[exact - 1])), LIVE + number: (0, STALE)}
        context = context_of(self.model)
        self.doubts, self._repairs = Doubts(context), Repairs(context)
        self.watches: list[Watch] = []
        self.repairs: list[Repair] = []

    def watch(
        self, number: int, *, margin: float = MARGIN, seconds: float = 0.0, compares: bool = True, answered: int = 3
    ) -> None:
        """Look at the last token, of which this worker hears in two jobs."""
        tokens, n_known = self.tokens[number], len(self.tokens[number]) - 1
        middle = (self.exact + n_known) // 2

        states, of_states = None, [0] * (n_known // STATE_BLOCK) + [LIVE + number]
        if self.model.states:
            states = RepairStates(running={1: RUNNING + number}, shown={1: SHOWN + number}, shown_end=middle)

        def job(span: Span, known: Any, blocks: Any, is_first: bool) -> DoubtJob:
            tables = (blocks, np.array(of_states if is_first else [], np.int64)) if states else (blocks,)
            return DoubtJob(
                request=str(number), margin=margin, span=span, tokens=known, blocks=tables, is_first=is_first,
                seconds=seconds, prompt_tokens=n_known + 1 - answered, compares=compares, is_audited=True,
                states=states,
            )  # fmt: skip

        first = job(Span(self.exact, middle + 1), tokens[self.exact : middle], self.blocks[number][:1], True)
        second = job(Span(self.exact, n_known + 1), tokens[middle:n_known], self.blocks[number][1:], False)
        watch, repair = Watch(first), self._repairs.begin(first.prompt_tokens, compares=compares)
        watch.add(second)
        self.watches.append(watch)
        self.repairs.append(repair)
        self.doubts.watch(second, watch, repair)

    def rows(self, margins: list[float]) -> Rows:
        """Rows in which the second token is so much less likely than the first."""
        logits = torch.full((len(margins), VOCABULARY), -9.0)
        logits[:, 0] = 0.0
        logits[:, 1] = -torch.tensor(margins)
        return Rows([*map(str, range(len(margins)))], logits, [int(tokens[-1]) for tokens in self.tokens])


@given(
    st.lists(st.tuples(st.integers(8, 60), st.sampled_from([0.1, 0.4, 0.9, 5.0])), min_size=1, max_size=4),
    st.booleans(),
)
def test_rows_in_doubt_become_those_of_exact_kv_and_others_stay_as_they_were(requests, is_recurrent):
    worker = Worker([length for length, _ in requests], is_recurrent=is_recurrent)
    worker.doubts.begin_step(7, pause_s=1.0)
    for number in range(len(requests)):
        worker.watch(number)
    rows = worker.rows([margin for _, margin in requests])
    before = rows.logits.clone()
    near = worker.doubts.look(rows)
    for number, (length, margin) in enumerate(requests):
        repair, sums = worker.repairs[number], worker.sums[number]
        kv = worker.model.kv[worker.blocks[number][0] * BLOCK :][:length]
        if margin < MARGIN:
            assert (kv == sums).all() and worker.watches[number].is_exact
            if is_recurrent:
                middle, states = (worker.exact + length - 1) // 2, worker.model.states
                assert states[LIVE + number] == (length, sums[-1]) and states[SHOWN + number] == (
                    middle,
                    sums[middle - 1],
                )
            assert rows.logits[number].equal(predictions(sums[-1:])[0])
            result = repair.result()
            assert result and result.held and result.tokens == length - worker.exact
            assert result.held.step == 7 and result.held.position == length
            assert result.held.margin == pytest.approx(margin, abs=1e-5)
            likeliest = predictions(sums[:-1]).argmax(1)
            said = worker.tokens[number][1:]
            first = length - 4  # behind the last token of the prompt
            assert result.compared == 3
            assert result.differing == tuple(at for at in range(3) if likeliest[first + at] != said[first + at])
        else:
            assert (kv[worker.exact :] == STALE).all() and repair.result() is None
            assert not is_recurrent or worker.model.states[LIVE + number] == (0, STALE)
            assert rows.logits[number].equal(before[number])
    assert near == {str(n): pytest.approx(m, abs=1e-5) for n, (_, m) in enumerate(requests) if MARGIN <= m < 2 * MARGIN}
    n_computed = sum(length - worker.exact for length, margin in requests if margin < MARGIN)
    assert sum(worker.model.forwards) == n_computed
    # A forward ends where a state is shown.
    n_ends = len(requests) * (1 + is_recurrent)
    assert len(worker.model.forwards) <= -(-n_computed // worker.model.max_tokens) + n_ends
    assert worker.doubts.look(rows) == {}, "each token is looked at once"


def test_a_step_is_held_for_the_least_sure_tokens_that_the_bound_allows():
    worker = Worker([20, 20, 20, 20])
    worker.doubts.begin_step(1, pause_s=2.5)
    for number, seconds in enumerate((1.0, 1.0, 1.0, 9.0)):
        worker.watch(number, seconds=seconds)
    near = worker.doubts.look(worker.rows([0.3, 0.1, 0.2, 0.05]))
    assert [watch.is_exact for watch in worker.watches] == [False, True, True, False] and set(near) == {"0", "3"}


def test_what_is_masked_stays_so_and_margins_are_those_of_what_is_sampled():
    worker = Worker([20, 20])
    worker.doubts.begin_step(1, pause_s=1.0)
    worker.watch(0)
    worker.watch(1, compares=False)
    rows = worker.rows([0.1, 0.1])
    rows.logits[0, 2:] = -torch.inf
    rows.logits[1, 1:] = -torch.inf  # one token is allowed, so there is no doubt
    worker.doubts.look(rows)
    exact = predictions(worker.sums[0][-1:])[0]
    assert rows.logits[0].tolist() == [*exact[:2].tolist(), *[-torch.inf] * (VOCABULARY - 2)]
    assert [watch.is_exact for watch in worker.watches] == [True, False] and rows.n_processed == 1


def test_an_audit_compares_the_prediction_behind_the_prompt_with_that_from_exact_kv():
    worker = Worker([20])
    worker.doubts.begin_step(1, pause_s=1.0)
    worker.watch(0, answered=0)
    rows = worker.rows([0.1])
    blended = rows.logits[0].clone()
    worker.doubts.look(rows)
    result = worker.repairs[0].result()
    expected = compared(blended, predictions(worker.sums[0][-1:])[0]).tolist()
    assert result and result.audit == AuditOutcome(bool(expected[0]), expected[1])


def test_a_request_that_the_step_does_not_sample_or_whose_repair_has_failed_is_left_alone():
    worker = Worker([20, 20])
    worker.doubts.begin_step(1, pause_s=1.0)
    worker.watch(0)
    worker.watch(1)
    worker.repairs[0].fail(RuntimeError("of before"))
    rows = worker.rows([0.1])
    before = rows.logits.clone()
    worker.doubts.look(rows)
    assert rows.logits.equal(before) and not worker.model.forwards


@pytest.mark.parametrize("is_recurrent", [False, True])
def test_a_forward_that_fails_lets_the_tokens_go_and_is_reported(is_recurrent):
    worker = Worker([20], is_recurrent=is_recurrent)
    worker.doubts.begin_step(1, pause_s=1.0)
    worker.watch(0)
    worker.model.fails_behind = 0
    rows = worker.rows([0.1])
    before = rows.logits.clone()
    assert set(worker.doubts.look(rows)) == {"0"}
    result = worker.repairs[0].result()
    assert rows.logits.equal(before) and result and "no memory is left" in result.error
    assert not is_recurrent or worker.model.states[LIVE] == (0, STALE)
