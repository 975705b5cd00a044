"""What the scheduler side tells of each request that has ended, and why stretches of its prompt were not reused."""

import json
import logging
import time

import pytest
from vllm import SamplingParams
from vllm.v1.request import Request

from blendhub.client.wire import Found
from blendhub.core.layout import Variant
from blendhub.core.spans import Match, Span
from blendhub.outcome.reasons import NotReused, Why, not_reused
from blendhub.vllm.costs import Cost, Costs
from blendhub.vllm.decision import Refusal
from blendhub.vllm.messages import LoadResult
from blendhub.vllm.scheduler.decide import Limits, decide
from blendhub.vllm.scheduler.outcomes import outcome_of
from blendhub.vllm.scheduler.request.served_request import ServedRequest
from blendhub.vllm.scheduler.request.terms import Terms
from tests.stand_in import StandIn
from tests.vllm.played_engine import text

EXACT = Match(Span(0, 200), 1, 0, True)
MOVED = Match(Span(300, 900), 2, 0, False)
FAR = Match(Span(300, 900), 2, 3800, False)
CLOSE = Match(Span(200, 300), 2, 0, False)
BEHIND = Match(Span(600, 1000), 1, 600, True)
LATE = Match(Span(940, 1000), 2, 0, False)
NEW = Why.NOTHING_STORED
FREE = Cost(0.0)
SLOW = Costs(
    prefill=Cost(1.0),
    probe=FREE,
    recompute=Cost(0.0, measured=((5000.0, 5000.0),)),
    load=FREE,
    engine_tokens=1000,
    token_bytes=1000.0,
)
"""A forward of a blend takes longer than to compute the whole prompt."""


def looked_up(found):
    """A request of 1000 tokens; None: the hub has not answered."""
    request = Request("r", [1] * 1000, SamplingParams(max_tokens=1), None)
    served = ServedRequest(request, Terms(Variant(), "blend", 0.15, True), 16)
    served.reuse.look_up(StandIn(close=lambda: None))
    if found:
        served.reuse.answered(found)
    return served


def reasons(outcome):
    """The stretches that were computed, as where each begins and why, and where the last one ends."""
    stretches = not_reused(outcome.strip(), outcome.unused)
    return [(stretch.span.start, stretch.span.end, stretch.code) for stretch in stretches]


@pytest.mark.parametrize(
    "matches, arguments, expected",
    [
        ([EXACT, MOVED], {}, [(200, 300, NEW), (900, 1000, NEW)]),
        ([EXACT], {"on_the_way": (Span(250, 300),)}, [(200, 250, NEW), (250, 300, Why.ON_THE_WAY), (300, 1000, NEW)]),
        ([EXACT], {"staying": (NotReused(Span(250, 300), Why.SHALLOW),)},
         [(200, 250, NEW), (250, 300, Why.SHALLOW), (300, 1000, NEW)]),
        ([Match(Span(0, 1000), 1, 0, True)], {}, [(999, 1000, Why.LAST)]),
        ([EXACT, MOVED], {"blend": False}, [(200, 300, NEW), (300, 900, Why.NOTHING_EXACT), (900, 1000, NEW)]),
        ([EXACT, FAR], {}, [(200, 300, NEW), (596, 900, Why.BEYOND), (900, 1000, NEW)]),
        ([EXACT, MOVED], {"holes": False}, [(200, 300, NEW), (300, 900, Why.BEHIND_HOLE), (900, 1000, NEW)]),
        (
            [EXACT, CLOSE, BEHIND],
            {"holes": False, "costs": SLOW},
            [(200, 300, Why.TOO_SLOW), (300, 600, NEW), (600, 999, Why.BEHIND_HOLE), (999, 1000, Why.LAST)],
        ),
        ([MOVED], {"min_reused_tokens": 2000}, [(0, 300, NEW), (300, 900, Why.TOO_LITTLE), (900, 1000, NEW)]),
        (
            [EXACT, BEHIND],
            {"costs": SLOW},
            [(200, 600, NEW), (600, 999, Why.TOO_SLOW), (999, 1000, Why.LAST)],
        ),
        (
            [Match(Span(0, 100), 1, 0, True), LATE],
            {"min_reused_tokens": 120},
            [(0, 100, Why.TOO_LITTLE), (100, 940, NEW), (940, 999, Why.TOO_MUCH), (999, 1000, Why.LAST)],
        ),
        ([EXACT], {"error": "the hub is gone"}, [(0, 200, Why.FAILED), (200, 1000, NEW)]),
    ],
)  # fmt: skip
def test_every_stretch_that_is_computed_has_its_reason(matches, arguments, expected):
    usual = {"blend": True, "holes": True, "costs": None, "on_the_way": (), "staying": (), "error": ""}
    blend, holes, costs, on_the_way, staying, error = (arguments.get(name, usual[name]) for name in usual)
    found = Found(matches=tuple(matches), on_the_way=on_the_way, staying=staying)
    policy = {name: value for name, value in arguments.items() if name not in usual}
    limits = Limits(0.15, 0.15, 0 if blend else None, holes, n_positions=4096, costs=costs, **policy)
    choice = decide(found, 1000, 0, limits)
    served = looked_up(found)
    served.reuse.decided(choice)
    if choice.decision:
        served.reuse.begin_load()
        served.end_load(LoadResult(error=error))
    else:
        served.reuse.refuse(choice.refusal)
    outcome = outcome_of(served)
    assert reasons(outcome) == expected
    assert not error or (outcome.reason, outcome.spans.exact, outcome.sources) == (error, (), ())


@pytest.mark.parametrize("found, start", [(Found(matches=(EXACT,)), 200), (None, 1000)])
def test_what_was_not_loaded_or_not_looked_up_has_the_reason_of_that(found, start):
    served = looked_up(found)
    assert reasons(outcome_of(served))[0] == (0, start, Why.ENDED)
    served.reuse.refuse(Refusal(Why.HUB_FAILED, "it does not answer"))
    assert reasons(outcome_of(served))[0] == (0, start, Why.HUB_FAILED)


# Through the scheduler side and a real hub.


def explained(engine, name):
    """The hub's record, as `blendhub explain` asks for it."""
    engine.settle()
    return engine.client.explain(name).result().outcome


def test_the_hub_the_response_and_the_debug_log_tell_what_became_of_a_request(engine, caplog):
    with caplog.at_level(logging.DEBUG, logger="blendhub"):
        engine.serve("a", text(0, 96))
        engine.serve("b", text(1, 32) + text(0, 96))
    first, second = explained(engine, "a"), explained(engine, "b")
    assert first.reason == "nothing of this prompt is stored" and first.ended_at > 1.6e9 and not first.sources
    assert [(stretch.span.start, stretch.span.end, stretch.fate) for stretch in second.strip()] == [
        (0, 32, "hole"), (32, 127, "moved"), (127, 128, "computed"),
    ]  # fmt: skip
    (source,) = second.sources
    assert (source.span, source.source_start, source.exact, second.reason) == (Span(32, 127), 0, False, None)
    # Streamed responses and batches do not carry the report: each is a line of JSON in the log.
    lines = [json.loads(line) for line in caplog.messages if line.startswith("{")]
    assert [line["request"] for line in lines] == ["a", "b"] and lines[1]["blendhub"]["moved_tokens"] == 95
    assert sum("nothing of this prompt is stored" in line for line in caplog.messages) == 2, "and the reason once"


def test_each_request_is_timed_once_from_its_arrival_to_the_step_that_sampled_its_first_token(engine):
    engine.serve("a", text(0, 96))
    kept = engine.side.take_stats().data
    assert len(kept["time_to_first_token_seconds_none"]) == 1
    request = engine.arrived("b", text(0, 96) + text(1, 32))
    request.arrival_time = time.time() - 60
    engine.load(request)
    engine.step(b=(96, 32))
    assert not any("first_token" in name for name in engine.side.take_stats().data)
    request.append_output_token_ids(5)
    (seconds,) = engine.side.take_stats().data["time_to_first_token_seconds_exact"]
    assert 60 <= seconds < 90
    engine.load(request)  # it was preempted
    engine.side.ended(request, ([],))
    assert not any("first_token" in name for name in engine.side.take_stats().data)


@pytest.mark.parametrize("local, exact", [(0, [[0, 96]]), (32, [[32, 96]]), (144, [])])
def test_what_a_preempted_request_finds_of_its_answer_is_no_part_of_its_prompt(engine, local, exact):
    """``local``: the tokens that vLLM has still."""
    prompt, answer = text(0, 96), text(1, 64)
    engine.serve("a", prompt + answer)
    request = engine.arrived("b", prompt, explain=True)
    engine.load(request)
    request.append_output_token_ids(answer)
    request.num_preemptions = 1
    engine.side.requests.known["b"].reuse.look_up(None)
    engine.load(request, local)
    report = engine.report("b")
    assert (report["engine_tokens"], report["exact_tokens"]) == (min(local, 96), max(0, 96 - local))
    assert report.get("spans", {"exact": []})["exact"] == exact
