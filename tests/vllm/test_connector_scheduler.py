"""The connector in vLLM's scheduler: plans, reports and the log."""

import json
import logging

from vllm.v1.core.sched.output import SchedulerOutput

from blendhub.vllm.messages import LoadResult, WorkerReport
from blendhub.vllm.watching.stats import BlendHubStats
from tests.vllm.played_engine import NAMESPACE, text


def test_a_reason_is_logged_once(engine, caplog):
    with caplog.at_level(logging.INFO, logger="blendhub"):
        for number in range(3):
            engine.serve(f"r{number}", text(number, 32))
            BlendHubStats.taken_from(engine.counters)
    assert sum("nothing of this prompt is stored" in line for line in caplog.messages) == 1


def test_a_plan_names_preempted_requests_and_one_of_them_the_hub_s_place(engine):
    output = SchedulerOutput.make_empty()
    plan = engine.side.plan(output)
    assert plan.preempted == set() and plan.hub.namespace == NAMESPACE
    output.preempted_req_ids = {"a", "b"}
    plan = engine.side.plan(output)
    assert plan.preempted == {"a", "b"} and plan.hub is None


def test_a_load_carries_the_whole_prompt(engine):
    """A selector looks at the question too, which comes after what is loaded."""
    engine.serve("a", text(0, 64))
    request = engine.arrived("b", [*text(0, 64), *text(1, 9)])
    engine.side.allocated(request, (list(range(5)),), engine.turn(request, 0)[0])
    (load,) = engine.side.plan(SchedulerOutput.make_empty()).loads
    assert load.decision.end == 64 and load.tokens.tolist() == request.prompt_token_ids
    engine.side.ended(request, (list(range(5)),))


def test_a_load_that_another_connector_takes_over_is_a_refusal_with_a_reason(engine):
    """In MultiConnector, the first connector that has KV of a prompt loads it, and the others hear of 0 tokens."""
    engine.serve("a", text(0, 96))
    request = engine.arrived("b", text(0, 128))
    assert engine.turn(request, 0) == (96, True)
    engine.side.allocated(request, (list(range(4)),), 0)
    assert not engine.side.plan(SchedulerOutput.make_empty()).loads
    assert engine.counters["refused_other_connector"] == 1
    _, response = engine.side.ended(request, (list(range(4)),))
    assert response["blendhub"]["reason"] == "another connector of MultiConnector loads its KV"
    engine.settle()
    assert engine.gauge("read_leases") == 0


def test_an_aborted_load_is_cancelled(engine):
    engine.serve("a", text(0, 64))
    request = engine.arrived("b", text(0, 96))
    n_external, asynchronous = engine.turn(request, 0)
    assert (n_external, asynchronous) == (64, True)
    engine.side.allocated(request, (list(range(4)),), n_external)
    plan = engine.side.plan(SchedulerOutput.make_empty())
    assert [load.request for load in plan.loads] == ["b"]
    assert engine.side.ended(request, (list(range(4)),))[0] is False
    plan = engine.side.plan(SchedulerOutput.make_empty())
    assert plan.cancelled == {"b"} and not plan.loads
    engine.settle()
    assert engine.gauge("read_leases") == 1, "the workers may still copy"
    engine.side.process_report(WorkerReport(loads={"b": LoadResult(error="aborted")}))
    engine.settle()
    assert engine.gauge("read_leases") == 0


def test_the_debug_log_has_each_report_in_a_line_of_json(engine, caplog):
    """Streamed responses and batches do not carry it."""
    document = text(0, 96)
    with caplog.at_level(logging.DEBUG, logger="blendhub"):
        engine.serve("a", document)
        request = engine.arrived("b", text(1, 32) + document)
        engine.load(request)
        report = engine.report("b")
        engine.end(request, 128)
    lines = [line for line in caplog.messages if line.startswith("{")]
    assert not any("\n" in line for line in lines)
    assert [json.loads(line)["request"] for line in lines] == ["a", "b"]
    assert json.loads(lines[1])["blendhub"].items() <= report.items() and report["moved_tokens"] == 95
