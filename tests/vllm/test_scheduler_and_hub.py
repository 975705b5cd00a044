"""The scheduler side when the hub is slow, frozen, gone or cleared."""

import time

import pytest
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput

from blendhub.client.session import PendingReply
from blendhub.core.errors import LeaseError
from blendhub.hub.config import HubConfig
from blendhub.hub.embedded import HubInThread
from blendhub.vllm.messages import WorkerReport
from tests.vllm.played_engine import HOST, SETTINGS, PlayedEngine, text
from tests.vllm.standing_still import standing_still

pytestmark = pytest.mark.slow


def test_a_lookup_is_sent_on_arrival_and_its_answer_is_kept(engine):
    engine.serve("a", text(0, 96))
    request = engine.arrived("b", text(1, 32) + text(0, 96))
    time.sleep(1.2 * SETTINGS.lookup_timeout_s)
    with standing_still(engine.hub):
        assert engine.turn(request, 0) == (127, True)


def test_a_new_session_causes_a_new_lookup():
    """The lease ended with the session before."""
    with HubInThread(HubConfig(arena_gib=0.01, metrics=""), HOST) as hub:
        engine = PlayedEngine(hub)
        engine.serve("a", text(0, 96))
        request = engine.arrived("b", text(1, 32) + text(0, 96))
        assert engine.turn(request, 0) == (127, True)
        lookup = engine.side._requests["b"].lookup
        engine.side.executor.client._join()
        assert engine.turn(request, 0) == (127, True)
        assert engine.side._requests["b"].lookup is not lookup
        engine.close()


def test_a_wait_for_the_hub_is_for_an_event_and_no_loop_that_asks_again(engine, monkeypatch):
    asked, done = [], PendingReply.done
    monkeypatch.setattr(PendingReply, "done", lambda reply, within=0.0: asked.append(within) or done(reply, within))
    monkeypatch.setattr("blendhub.vllm.scheduler.load_scheduler.LOOKUP_WAIT_S", 0.05)
    engine.step()
    with standing_still(engine.hub):
        request = engine.arrived("a", text(0, 64))
        before = len(asked)
        started = time.monotonic()
        assert engine.turn(request, 0) == (None, False)
        assert time.monotonic() - started >= 0.05 and len(asked) - before == 1


@pytest.mark.alone
def test_a_frozen_hub_delays_the_scheduler_by_the_wait_of_a_step_at_most(engine, monkeypatch):
    engine.answer_within(0.3)
    monkeypatch.setattr("blendhub.vllm.scheduler.load_scheduler.LOOKUP_WAIT_S", 0.002)
    engine.step()
    with standing_still(engine.hub):
        request = engine.request("a", text(0, 64))
        started = time.monotonic()
        engine.side.arrived(request)
        longest = 0.0
        while True:
            before = time.monotonic()
            engine.side.plan(SchedulerOutput.make_empty())
            n_external, _ = engine.side.matched(request, 0)
            longest = max(longest, time.monotonic() - before)
            if n_external is not None:
                break
        assert n_external == 0 and time.monotonic() - started < 0.6 and longest < 0.1
        assert "lookup_timeout_s" in engine.report("a")["reason"]
        # Who comes now is not kept waiting at all.
        another = engine.arrived("b", text(1, 64))
        assert engine.turn(another, 0) == (0, False)
        started = time.monotonic()
        engine.side.clear()
        assert time.monotonic() - started < 0.1
    assert engine.counters["refused_hub_failed"] == 2


def test_a_clear_drops_matches_and_saves(engine):
    document = text(0, 96)
    engine.serve("a", document)
    waiting = engine.arrived("b", text(1, 32) + document)
    computing, prompt = engine.request("c", text(2, 64)), text(2, 64)
    engine.side.arrived(computing)
    engine.load(computing)
    engine.step(c=(0, 32))
    assert engine.turn(waiting, 0)[0] == 127
    assert engine.side.clear()
    engine.settle()
    assert engine.turn(waiting, 0) == (0, False)
    engine.step(c=(32, 32))
    engine.end(computing, 64)
    assert engine.found(document, exact=True) == set() == engine.found(prompt, exact=True)
    assert engine.gauge("write_leases") == 0


def test_a_clear_drops_uncommitted_saves(engine):
    prompt = text(0, 64)
    request = engine.arrived("a", prompt)
    engine.load(request)
    engine.step(a=(0, 32))
    request.append_output_token_ids(1)
    request.num_computed_tokens = 64
    assert engine.side.ended(request, ([1, 2, 3, 4],))[0]
    plan = engine.side.plan(SchedulerOutput.make_empty())
    assert plan.ending == {"a"} and plan.saves[-1].slot.span.end == 64
    engine.side.clear()
    engine.settle()
    with pytest.raises(LeaseError):
        engine.client.commit(plan.saves[-1].right, 64)
    assert engine.found(prompt, exact=True) == set()


@pytest.mark.alone
def test_blocks_are_kept_for_a_missing_reservation_until_the_timeout_only(engine):
    engine.side.saves._timeout_s = 0.2
    request = engine.arrived("a", text(0, 64))
    engine.load(request)
    with standing_still(engine.hub):
        output = SchedulerOutput.make_empty()
        output.scheduled_cached_reqs = CachedRequestData.make_empty()
        output.scheduled_cached_reqs.req_ids.append("a")
        output.scheduled_cached_reqs.num_computed_tokens.append(0)
        output.num_scheduled_tokens = {"a": 64}
        engine.side.plan(output)
        request.append_output_token_ids(1)
        request.num_computed_tokens = 64
        assert engine.side.ended(request, ([1, 2, 3, 4],))[0]
        started = time.monotonic()
        while "a" not in engine.side.plan(SchedulerOutput.make_empty()).ending:
            assert time.monotonic() - started < 0.5
        assert engine.counters["reservations_failed_DeadlineExceeded"] == 1
        engine.side.process_report(WorkerReport(committed_ranks={"a": 1}))
    # The room that it gives all the same is given back.
    engine.settle()
    assert engine.gauge("write_leases") == 0
    assert not engine.side.has_work
