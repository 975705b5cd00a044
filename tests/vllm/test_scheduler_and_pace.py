"""What recomputation has of a step, what is left to vLLM because that is sooner done, and who waits for whom."""

import time

import msgspec
import pytest
from vllm import SamplingParams
from vllm.v1.request import Request

from blendhub.vllm.costs import Cost, Costs
from blendhub.vllm.messages import LoadResult, WorkerReport
from blendhub.vllm.scheduler.blend_queue import SPARE_STEPS, BlendQueue
from blendhub.vllm.scheduler.request.served_request import Requests
from blendhub.vllm.settings import ReusePolicy
from tests.vllm.played_engine import SETTINGS, played_engine, text

ENGINE = 100
"""What vLLM computes in a step."""
LONG = ENGINE + 1


def request(number, priority=0):
    return Request(str(number), [1], SamplingParams(), None, arrival_time=float(number), priority=priority)


@pytest.mark.parametrize("n_blended, steps", [(1, 10), (4, 40)])
def test_nobody_waits_longer_than_recomputation_takes_beside_others(monkeypatch, n_blended, steps):
    """The bound counts all requests together, but no wait for hub or copy: 25 tokens in each step."""
    monkeypatch.setattr("blendhub.vllm.scheduler.blend_queue.MIN_WAIT_S", 0.0)
    queue = BlendQueue(ENGINE, Requests())
    for number in range(n_blended):
        queue.begin(request(number, priority=1), 250)
    # In vLLM's order, which may be by priority.
    assert not queue.must_wait(request(9, priority=0), LONG) and queue.must_wait(request(9, priority=1), LONG)
    held = 0
    while queue.must_wait(request(9, priority=1), LONG):
        queue.next_step()
        held += 1
    assert held == steps + SPARE_STEPS + 1


@pytest.mark.parametrize(("scheduled", "budget"), [(0, 8192), (1000, 7192), (8192, 2048)])
def test_recomputation_has_a_share_of_every_step(scheduled, budget):
    assert BlendQueue(8192, Requests()).budget(scheduled) == budget


# Through the scheduler side and a real hub.

BUDGET = 2048
"""vLLM's, of a step."""
STORED = text(0, 600)
BLENDED = [*text(1, 32), *STORED, *text(2, 9)]


@pytest.fixture
def engine():
    with played_engine() as engine:
        engine.serve("stored", STORED)
        yield engine


def test_a_prompt_that_is_sooner_computed_is_served_without_blending_and_its_report_says_both_times():
    prefill, probe, nothing = Cost(1e-3, measured=((0.02, 0.02),)), Cost(1e-3, measured=((0.7, 0.7),)), Cost(0.0)
    costs = Costs(prefill=prefill, probe=probe, recompute=nothing, load=nothing, engine_tokens=512)
    settings = msgspec.structs.replace(SETTINGS, policy=ReusePolicy(min_donor_context=0))
    with played_engine(settings=settings, costs=costs) as engine:
        engine.serve("stored", STORED)
        engine.serve("more", [*STORED, *text(40, 9)])
        assert engine.load(engine.arrived("r", BLENDED)) == 0 and engine.counters["refused_too_slow"] == 1
        reason = engine.report("r")["reason"]
        assert "would take about 935.0 ms with reuse up to token 632, and 641.0 ms without; policy.min" in reason
        # Exact text is reused all the same.
        assert engine.load(engine.arrived("exact", [*STORED, *BLENDED])) == 600
        report = engine.report("exact")
        assert (report["exact_tokens"], report["moved_tokens"]) == (600, 0) and " reuse up to token 600;" in report[
            "reason"
        ]
        # A load waits for steps as short as any of the last ones, and not for pauses of an engine without requests.
        assert engine.side.loads._costs.step < 0.02
        for _ in range(9):
            time.sleep(0.03)
            engine.step()
        assert engine.side.loads._costs.step == 0.02


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
