"""What recomputation has of a step, what is left to vLLM because that is sooner done, and who waits for whom."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.v1.request import Request

from blendhub.vllm.messages import LoadResult, WorkerReport
from blendhub.vllm.scheduler.blend_queue import SPARE_STEPS, BlendQueue
from blendhub.vllm.scheduler.decide import Pace
from blendhub.vllm.settings import Settings
from tests.stand_in import StandIn
from tests.vllm.played_engine import played_engine, text

ENGINE = 100
"""What vLLM computes in a step."""
LONG = ENGINE + 1


def request(number, priority=0):
    return Request(str(number), [1], SamplingParams(), None, arrival_time=float(number), priority=priority)


@pytest.mark.parametrize("n_blended, n_computed, steps", [(1, 0, 3), (4, 0, 10), (1, 6 * ENGINE, 7)])
def test_nobody_waits_longer_than_recomputation_should_take(monkeypatch, n_blended, n_computed, steps):
    """The bound counts all requests together and the prompts that vLLM has begun, but no wait for hub or copy."""
    monkeypatch.setattr("blendhub.vllm.scheduler.blend_queue.LEAST_S", 0.0)
    queue = BlendQueue(Settings(), ENGINE, {"computed": StandIn(left_to_engine=n_computed)})
    for number in range(n_blended):
        queue.begin(request(number, priority=1), 250)
    # In vLLM's order, which may be by priority.
    assert not queue.must_wait(request(9, priority=0), LONG) and queue.must_wait(request(9, priority=1), LONG)
    held = 0
    while queue.must_wait(request(9, priority=1), LONG):
        queue.next_step()
        held += 1
    assert held == steps + SPARE_STEPS + 1


def steps(n_tokens, of_step):
    number = 0
    while n_tokens > 0:
        n_tokens -= of_step(number)
        number += 1
    return number


@given(st.builds(Pace, *[st.integers(1, 20)] * 3, st.integers(0, 9)), st.integers(0, 300))
def test_a_prompt_takes_as_many_steps_as_its_tokens_need(pace, n):
    assert pace.steps_to_compute(n) == steps(n, lambda number: pace.engine)
    recomputed = steps(n, lambda number: pace.beside if number < pace.full_steps else pace.alone)
    assert pace.steps_to_recompute(n) == recomputed
    # An engine without other prompts recomputes no slower than it computes.
    alone = BlendQueue(Settings(), 512, {}).pace()
    assert alone.steps_to_recompute(n) <= alone.steps_to_compute(n)


@pytest.mark.parametrize(
    ("most", "scheduled", "budget"), [(0, 0, 8192), (0, 1000, 7192), (0, 8192, 2048), (100, 0, 100), (5000, 8192, 2048)]
)
def test_recomputation_has_a_share_of_every_step(most, scheduled, budget):
    assert BlendQueue(Settings(blend_tokens_per_step=most), 8192, {}).budget(scheduled) == budget


# Through the scheduler side and a real hub.

BUDGET = 2048
"""vLLM's, of a step."""
STORED = text(0, 600)
BLENDED = [*text(1, 32), *STORED, *text(2, 9)]
WITH_A_HOLE = [*text(1, 900), *STORED, *text(2, 9)]
"""990 of its tokens would be computed: less than all, and more than recomputation has in a step that vLLM fills."""


@pytest.fixture
def engine():
    with played_engine() as engine:
        engine.serve("stored", STORED)
        yield engine


def test_a_prompt_that_vllm_computes_sooner_is_served_without_blending_and_its_report_says_so(engine):
    engine.serve("more", [*STORED, *text(40, 9)])
    others = [engine.arrived(f"other {number}", text(3 + number, 1000)) for number in range(30)]
    assert not any(map(engine.load, others))
    engine.step()
    late = engine.arrived("r", WITH_A_HOLE)
    assert engine.load(late) == 0 and engine.counters["refused_too_slow"] == 1
    reason = engine.report("r")["reason"]
    assert reason.startswith("recomputing 990 tokens would take about 2 steps, and computing 1500 takes vLLM 1; ")
    # Exact text is reused all the same, and moved text without a hole.
    others += [engine.arrived("exact", [*STORED, *WITH_A_HOLE]), engine.arrived("moved", BLENDED)]
    assert engine.load(others[-2]) == 600
    report = engine.report("exact")
    assert (report["exact_tokens"], report["moved_tokens"]) == (600, 0) and "recomputing 990" in report["reason"]
    assert engine.load(others[-1]) == 632 and "reason" not in engine.report("moved")
    # Once vLLM has computed the others, there is room.
    engine.side.ended(late, ([],))
    for other in others:
        other.num_computed_tokens = len(other.prompt_token_ids)
    engine.step()
    assert engine.load(engine.arrived("again", WITH_A_HOLE)) == 1500


def begin_load(engine, prompt=BLENDED):
    """A request whose load has begun, and has not ended."""
    request = engine.arrived("loading", prompt)
    engine.side.allocated(request, (list(range(1, 42)),), engine.turn(request)[0])
    engine.step()
    return request


@pytest.mark.parametrize("how", ["loaded", "failed", "aborted"])
def test_a_long_prompt_waits_while_an_earlier_one_is_blended(engine, how):
    blended = begin_load(engine)
    long = engine.arrived("long", text(3, BUDGET + 1), mode="off")  # a prompt without reuse, too
    assert engine.turn(long)[0] is None
    engine.step()
    assert engine.turn(long)[0] is None
    # Others are blended beside it, and as many go on as vLLM computes in a step.
    assert engine.turn(engine.arrived("second", [*text(4, 32), *STORED, *text(5, 9)]))[0] == 632
    for number, matched in enumerate([0, 0, None]):
        short = engine.arrived(str(number), text(6 + number, 900))
        assert engine.turn(short)[0] == matched
        if matched == 0:
            engine.side.allocated(short, ([],), 0)
    if how == "aborted":
        engine.side.ended(blended, ([],))
    else:
        result = LoadResult(error="" if how == "loaded" else "the hub is gone")
        engine.side.process_report(WorkerReport(loads={"loading": result}))
    assert engine.turn(long)[0] == 0
