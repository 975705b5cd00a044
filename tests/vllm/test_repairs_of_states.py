"""What the scheduler side has repaired of a model with recurrent layers: on a real hub, with a played worker.

To the hub it is a model without such layers, whose text moves without maps.
"""

import msgspec
import pytest
from vllm.v1.core.sched.output import SchedulerOutput

from blendhub import Span
from blendhub.vllm.messages import LoadResult, RepairResult, WorkerReport
from blendhub.vllm.scheduler import repair_pace
from blendhub.vllm.scheduler.blocks.block_tables import BlockTables
from blendhub.vllm.scheduler.repair_pace import ON_CPUS
from tests.vllm.played_engine import BLOCK, SETTINGS, played_engine, text
from tests.vllm.test_repairs import FAST, FIRST, PROMPT, answering, step

SIZE = 64
"""The tokens from one state that vLLM may keep to the next."""
N, SHOWN_END = len(PROMPT), (len(PROMPT) - 1) // SIZE * SIZE
ALWAYS = msgspec.structs.replace(SETTINGS, repair="always")


@pytest.fixture
def start(monkeypatch):
    """A step repairs as much as is left."""
    monkeypatch.setattr(repair_pace, "MIN_TOKENS", 4096)
    monkeypatch.setattr(repair_pace, "ON_CPUS", ON_CPUS._replace(idle_s=0.0))
    engines = []

    def started(settings=ALWAYS):
        tables = BlockTables((BLOCK, SIZE), (None, None), (1,))
        engines.append(played_engine(settings=settings, costs=FAST, audits=True, holds=True, tables=tables))
        engine = engines[-1].__enter__()
        engine.blocks.of = lambda request: (list(range(1, 101)), list(range(301, 320)))
        engine.side.saves._state_tokens = None  # this hub stores no states
        engine.serve("stored", text(0, 96))
        return engine

    yield started
    for engine in engines:
        engine.__exit__(None, None, None)


def told(engine, **result):
    engine.side.process_report(WorkerReport(repairs={"a": RepairResult(**result)}))
    engine.step()


def test_a_repair_stops_where_a_state_is_shown_and_hands_over_at_its_end(start):
    engine = start()
    shown = []
    engine.blocks.cache_anew = lambda request, tables, first, end: shown.append((list(tables[1]), first, end))
    request = answering(engine, "a", n_answered=40, audit=True)
    computed = N + 39
    first, last = step(engine, request), step(engine, request)
    assert first.span == Span(FIRST, SHOWN_END) and last.span == Span(SHOWN_END, computed)
    assert (first.is_first, first.is_last, last.is_first, last.is_last) == (True, False, False, True)
    assert first.asks is None, "no state is there to predict the first token once more"
    assert first.states == last.states and first.states.shown_end == SHOWN_END
    (running,), (copied,) = first.states.running.values(), first.states.shown.values()
    assert running != copied and engine.blocks.n_lent == 2
    # Up to the state behind the step, which begins another block if it is the first one there.
    assert last.blocks[1].tolist() == list(range(301, 301 - (-(computed + 1) // SIZE)))
    told(engine, tokens=computed - FIRST)
    assert engine.blocks.n_lent == 0 and engine.counters["requests_repaired"] == 1
    ((table, since, until),) = shown
    assert (since, until) == (FIRST, computed)
    exact = [0] * (computed // SIZE)
    exact[SHOWN_END // SIZE - 1] = copied
    assert table[: computed // SIZE] == exact, "the states that the engine has computed before are approximate"
    assert "approximate_from" not in engine.report("a")


@pytest.mark.parametrize("why", ["preempted", "short_of_blocks", "failed", "freed_blocks"])
def test_whatever_ends_a_repair_early_gives_its_blocks_back_and_it_does_not_begin_anew(start, why):
    engine = start()
    request = answering(engine, "a")
    assert engine.blocks.n_lent == 2
    if why == "failed":
        told(engine, error="no memory is left")
    elif why == "preempted":
        known = engine.side.requests.known["a"]
        engine.side.repairs.preempted(known)
        engine.side.repairs.begin(known)
        assert engine.counters["repairs_ended_no_state"] == 1
    elif why == "short_of_blocks":
        engine.blocks.n_free = 20
    else:
        engine.blocks.of = lambda request: (list(range(1, 101)), [0] * 20)
    assert step(engine, request) is None
    assert engine.blocks.n_lent == 0 and engine.counters[f"repairs_ended_{why}"] == 1
    assert engine.report("a")["approximate_from"] == FIRST


def test_a_request_for_whose_states_there_are_no_blocks_is_counted_once(start):
    engine = start()
    engine.blocks.n_free = 20
    request = engine.arrived("a", PROMPT)
    there = engine.load(request)
    engine.side.allocated(request, engine._tables(N), 0)  # vLLM computes what follows the load
    engine.step(a=(there, N - there))
    assert engine.counters["repairs_ended_no_state"] == 1


def test_a_request_that_is_resumed_by_the_step_that_preempts_it_keeps_the_blocks_of_its_new_load(start):
    """vLLM resets its prefix cache between two steps, and preempts all requests for that."""
    engine = start()
    request = answering(engine, "a")
    request.num_computed_tokens = 0
    n_external, _ = engine.turn(request)
    engine.side.allocated(request, engine._tables(n_external), n_external)
    resuming = SchedulerOutput.make_empty()
    resuming.preempted_req_ids = {"a"}
    (job,) = engine.side.plan(resuming).loads
    assert job.keeps and engine.blocks.n_lent == 2 and engine.counters["repairs_ended_preempted"] == 1


def test_blocks_go_back_if_nothing_is_repaired_or_the_load_fails_and_without_them_nothing_is_repaired(start):
    engine = start(SETTINGS)
    answering(engine, "off")
    assert engine.blocks.n_lent == 0
    request = engine.arrived("failed", PROMPT, repair="always")
    engine.load(request, error="the accelerator is lost")
    assert engine.blocks.n_lent == 0
    aborted = engine.arrived("aborted", PROMPT, repair="always")
    n_external, _ = engine.turn(aborted)
    engine.side.allocated(aborted, engine._tables(n_external), n_external)
    assert engine.blocks.n_lent == 2
    engine.side.ended(aborted, ((), ()))
    engine.step()
    engine.side.process_report(WorkerReport(loads={"aborted": LoadResult()}))
    assert engine.blocks.n_lent == 0
    engine.blocks.n_free = 26  # a quarter of all are left to vLLM
    request = answering(engine, "short", repair="always")
    assert step(engine, request) is None and engine.counters["repairs_ended_no_state"] == 1
