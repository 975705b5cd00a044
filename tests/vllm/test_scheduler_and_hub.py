"""The scheduler side and its hub: lookups of requests that wait for their turn; a hub that is slow, gone, cleared."""

import time
from contextlib import nullcontext

import msgspec
import pytest
from vllm.v1.core.sched.output import SchedulerOutput

from blendhub import Span
from blendhub.core.errors import LeaseError
from blendhub.vllm.messages import LoadResult, WorkerReport
from blendhub.vllm.scheduler.loads import LoadScheduler
from tests.vllm.played_engine import NAMESPACE, SETTINGS, played_engine, text
from tests.vllm.standing_still import standing_still

DOCUMENT = text(0, 96)
PROMPT = [*DOCUMENT, *text(1, 32)]


@pytest.fixture
def engine():
    with played_engine() as engine:
        engine.serve("stored", DOCUMENT)
        yield engine


def test_what_vllm_has_is_not_leased_and_looked_up_again_where_vllm_has_evicted_it(engine):
    engine.blocks.cached = lambda hashes, most: 64
    assert engine.load(engine.arrived("r", PROMPT), local=64) == 96
    (match,) = engine.side.requests.known["r"].reuse.found.matches
    assert match.span == Span(64, 96)
    assert engine.load(engine.arrived("evicted", PROMPT), local=0) == 96
    assert engine.report("evicted")["exact_tokens"] == 96


@pytest.mark.parametrize("taken", [0, 32])
def test_what_vllm_does_not_take_as_it_was_claimed_is_not_loaded(engine, taken):
    """vLLM 0.33 takes none of it where it returns routed experts; nothing that is served takes a part."""
    request = engine.arrived("r", PROMPT)
    assert engine.turn(request) == (96, True)
    with pytest.raises(AssertionError, match="takes 32 of the 96 tokens") if taken else nullcontext():
        engine.side.allocated(request, ([*range(1, 9)],), taken)
    engine.step()
    assert not engine.loads
    if not taken:
        assert "to return routed experts" in engine.report("r")["reason"]
        engine.eventually(lambda: not engine.leases())


@pytest.mark.slow
def test_the_answer_to_a_lookup_stays_leased_until_the_request_s_turn_unless_the_session_ends(engine):
    request = engine.arrived("r", PROMPT)
    time.sleep(1.2 * SETTINGS.lookup_timeout_s)
    with standing_still(engine.hub):
        assert engine.turn(request) == (96, True)
    assert engine.leases() == 1
    lookup = engine.side.requests.known["r"].reuse.lookup
    engine.side.client._join()
    assert engine.turn(request) == (96, True)
    assert engine.side.requests.known["r"].reuse.lookup is not lookup
    assert engine.load(request) == 96
    engine.eventually(lambda: not engine.leases())


@pytest.mark.slow
def test_a_lookup_that_failed_while_the_request_waited_is_sent_again():
    with played_engine(settings=msgspec.structs.replace(SETTINGS, lookup_timeout_s=1.0)) as engine:
        engine.serve("stored", DOCUMENT)
        with standing_still(engine.hub):
            request = engine.arrived("r", PROMPT)
            time.sleep(1.2)
        engine.step()
        engine.eventually(lambda: engine.side.client.is_up and engine.client.is_up)
        assert engine.load(request) == 96


def test_a_request_asks_a_second_time_for_what_the_store_is_still_reading_and_no_more(engine, monkeypatch):
    """Also where no step has time left to wait for the answer."""
    lookup, waits = engine.side.client.lookup, []

    def while_the_store_reads(*arguments, **options):
        answer = lookup(*arguments, **options)
        read, waits[len(waits) :] = answer._read, [options["wait_s"] > 0]
        answer._read = lambda reply: msgspec.structs.replace(read(reply), on_the_way=(Span(96, 112),))
        return answer

    monkeypatch.setattr(engine.side.client, "lookup", while_the_store_reads)
    monkeypatch.setattr(LoadScheduler, "wait_left_s", 0.0)
    request, turns = engine.arrived("r", PROMPT), [(None, False)]
    while turns[-1][0] is None:
        assert len(turns) < 10
        engine.settle()
        engine.step()
        turns.append(engine.turn(request))
    assert turns[-1] == (96, True) and waits == [True, False]


def test_a_clear_drops_matches_and_saves_those_that_workers_do_too_and_nothing_is_found_before_it(engine):
    waiting, computing = engine.arrived("b", PROMPT), engine.arrived("c", text(2, 64))
    engine.load(computing)
    engine.step(c=(0, 32))
    computing.append_output_token_ids(1)
    computing.num_computed_tokens = 64
    assert engine.turn(waiting)[0] == 96
    assert engine.side.ended(computing, ([1, 2, 3, 4],))[0]
    plan = engine.side.plan(SchedulerOutput.make_empty())
    assert plan.ending == {"c"} and plan.saves[-1].slot.span.end == 64
    with standing_still(engine.hub):
        started = time.monotonic()
        engine.side.clear()
        assert time.monotonic() - started < 0.1 and engine.side.requests.known["b"].reuse.lookup is None
        late = engine.arrived("d", PROMPT)
        assert engine.turn(late) == (0, False) and "not cleared the cache yet" in engine.report("d")["reason"]
    engine.settle()
    assert engine.turn(waiting) == (0, False)
    with pytest.raises(LeaseError):
        engine.client.commit(plan.saves[-1].right, 64).result()
    assert engine.found(DOCUMENT, exact=True) == set() == engine.found(text(2, 64), exact=True)
    assert not engine.leases()


def test_a_clear_drops_what_was_computed_and_nothing_that_comes_after_it(engine):
    waiting, computing = engine.arrived("b", text(3, 64)), engine.arrived("c", text(2, 64))
    engine.load(computing)
    engine.step(c=(0, 32))
    engine.side.clear()
    engine.settle()
    engine.step(c=(32, 32))
    engine.load(waiting)
    engine.step(b=(0, 64))
    engine.end(waiting, 64)
    assert engine.found(text(3, 64), exact=True) == set(range(64)) and not engine.found(text(2, 64), exact=True)
    # The workers may still copy what they were told to save, although it will not be stored.
    computing.append_output_token_ids(1)
    computing.num_computed_tokens = 64
    assert engine.side.ended(computing, ([1, 2, 3, 4],))[0]
    assert engine.side.plan(SchedulerOutput.make_empty()).ending == {"c"}


def test_a_clear_that_waits_for_the_hub_has_not_failed(engine):
    """vLLM 0.33 would stay paused, and not sleep. Nothing is reused until the hub has cleared its cache."""
    engine.hub.close()
    engine.eventually(lambda: not engine.side.client.is_up)
    assert engine.side.clear() is None and engine.side.client.is_clearing


def test_a_plan_has_the_load_s_whole_prompt_the_preempted_requests_and_the_hub_s_place_once():
    """A selector looks at the question too, which comes after what is loaded."""
    with played_engine() as engine:
        output = SchedulerOutput.make_empty()
        output.preempted_req_ids = {"a", "b"}
        plan = engine.side.plan(output)
        assert plan.preempted == {"a", "b"} and plan.hub.namespace == NAMESPACE
        engine.serve("stored", DOCUMENT)
        request = engine.arrived("r", PROMPT)
        engine.side.allocated(request, (list(range(8)),), engine.turn(request)[0])
        plan = engine.side.plan(SchedulerOutput.make_empty())
        (load,) = plan.loads
        assert plan.hub is None and not plan.preempted
        assert load.decision.end == 96 and load.tokens.tolist() == PROMPT
        # It is aborted: the workers are told, and the lease lasts while they may still copy.
        assert engine.side.ended(request, (list(range(4)),))[0] is False
        plan = engine.side.plan(SchedulerOutput.make_empty())
        assert plan.cancelled == {"r"} and not plan.loads
        engine.settle()
        assert engine.leases() == 1
        engine.side.process_report(WorkerReport(loads={"r": LoadResult(error="aborted")}))
        engine.eventually(lambda: not engine.leases())
