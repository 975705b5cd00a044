"""What the scheduler side tells of each request that has ended, and why stretches of its prompt were not reused."""

import time

import msgspec
from vllm import SamplingParams
from vllm.v1.request import Request

from blendhub.client.wire import Found
from blendhub.core.layout import Variant
from blendhub.core.spans import Match, Span
from blendhub.outcome.reasons import Why, not_reused
from blendhub.vllm.decision import Refusal
from blendhub.vllm.messages import LoadResult
from blendhub.vllm.scheduler.admission import Terms
from blendhub.vllm.scheduler.decide import BlendTerms, EngineLimits, Pace, decide
from blendhub.vllm.scheduler.request_state import RequestState
from blendhub.vllm.settings import ReusePolicy
from tests.stand_in import StandIn
from tests.vllm.played_engine import SETTINGS, PlayedEngine, played_engine, text
from tests.vllm.standing_still import standing_still

LENGTH = 1000
EXACT = Match(Span(0, 200), 1, 0, True)
MOVED = Match(Span(300, 900), 2, 0, False)
FAR = Match(Span(300, 900), 2, 3800, False)
BEHIND = Match(Span(600, 1000), 1, 600, True)


def outcome_of(*matches, blend=True, holes=True, local=0, pace=None, on_the_way=(), error="", **policy):
    """The reasons in the note of a request of 1000 tokens, for those that it computes: from decision to note."""
    found = Found(matches=matches, on_the_way=on_the_way)
    choice = decide(
        matches, LENGTH, local, ReusePolicy(**policy), BlendTerms(blend, holes, 0.15, 0.15), EngineLimits(4096, pace),
        found.on_the_way_tokens,
    )  # fmt: skip
    state = looked_up(found)
    state.decided(choice)
    if choice.decision:
        state.begin_load()
        state.end_load(LoadResult(error=error))
    else:
        state.refuse(choice.refusal)
    return shown(state)


def looked_up(found):
    state = RequestState(
        Request("r", [1] * LENGTH, SamplingParams(max_tokens=1), None), Terms(Variant(), "blend", 0.15, True)
    )
    state.look_up()
    state.lookup = StandIn(close=lambda: None)
    if found:
        state.answered(found)
    return state


def shown(state):
    return reasons(state.outcome())


def reasons(outcome):
    return [(one.span.start, one.span.end, one.why) for one in not_reused(outcome.strip(), outcome.unused)]


def test_where_all_that_was_found_is_reused_the_rest_is_not_stored():
    assert outcome_of(EXACT, MOVED) == [(200, 300, Why.NOTHING_STORED), (900, 1000, Why.NOTHING_STORED)]


def test_what_is_still_read_from_the_store_is_said_to_be():
    assert outcome_of(EXACT, on_the_way=(Span(250, 300),)) == [
        (200, 250, Why.NOTHING_STORED), (250, 300, Why.ON_THE_WAY), (300, 1000, Why.NOTHING_STORED),
    ]  # fmt: skip


def test_the_last_token_is_computed_although_it_is_stored():
    assert outcome_of(Match(Span(0, LENGTH), 1, 0, True)) == [(999, 1000, Why.LAST)]


def test_moved_text_that_a_request_may_not_use():
    assert outcome_of(EXACT, MOVED, blend=False)[1] == (300, 900, Why.NOTHING_EXACT)


def test_keys_that_the_rotation_does_not_reach():
    assert outcome_of(EXACT, FAR) == [
        (200, 300, Why.NOTHING_STORED),
        (596, 900, Why.BEYOND),
        (900, 1000, Why.NOTHING_STORED),
    ]


def test_what_stands_behind_a_hole_where_no_holes_are_computed():
    assert outcome_of(EXACT, MOVED, holes=False)[1] == (300, 900, Why.BEHIND_HOLE)


def test_what_would_be_recomputed_too_much_is_told_from_what_stands_behind_a_hole():
    close = Match(Span(200, 300), 2, 0, False)
    of_both = outcome_of(EXACT, close, BEHIND, holes=False, max_recompute_share=0.01)
    assert of_both == [(200, 300, Why.TOO_MUCH), (300, 600, Why.NOTHING_STORED), (600, 999, Why.BEHIND_HOLE),
                       (999, 1000, Why.LAST)]  # fmt: skip


def test_a_refusal_is_the_reason_of_all_that_was_found():
    assert outcome_of(MOVED, max_recompute_share=0.1)[1] == (300, 900, Why.TOO_MUCH)
    assert outcome_of(MOVED, min_reused_tokens=2000)[1] == (300, 900, Why.TOO_LITTLE)
    assert outcome_of(MOVED, pace=Pace(100, 1, 100, 1000))[1] == (300, 900, Why.TOO_SLOW)
    assert outcome_of(EXACT, MOVED, max_recompute_share=0.0, min_reused_tokens=250) == [
        (0, 200, Why.TOO_LITTLE), (200, 300, Why.NOTHING_STORED), (300, 900, Why.TOO_MUCH),
        (900, 1000, Why.NOTHING_STORED),
    ]  # fmt: skip
    assert outcome_of(EXACT, min_reused_tokens=300, on_the_way=(Span(300, 400),))[0] == (0, 200, Why.TOO_LITTLE)


def test_exact_text_behind_a_hole_that_takes_too_long():
    found = outcome_of(EXACT, BEHIND, pace=Pace(100, 1, 100, 1000))
    assert found[1] == (600, 999, Why.TOO_SLOW)


def test_what_became_of_a_request_that_was_not_loaded():
    assert outcome_of(EXACT, error="the hub is gone")[0] == (0, 200, Why.FAILED)
    state = looked_up(Found(matches=(EXACT,)))
    assert shown(state)[0] == (0, 200, Why.ENDED)
    state.refuse(Refusal(Why.OTHER_CONNECTOR, "another one loads it"))
    assert shown(state)[0] == (0, 200, Why.OTHER_CONNECTOR)


def test_a_prompt_that_was_not_looked_up_has_the_reason_of_its_refusal():
    state = looked_up(None)
    assert shown(state) == [(0, 1000, Why.ENDED)]
    state.refuse(Refusal(Why.HUB_FAILED, "it does not answer"))
    assert shown(state) == [(0, 1000, Why.HUB_FAILED)]


# Through the scheduler side and a real hub.


def reported(engine, name):
    engine.settle()
    return reasons(engine.client.explain(name).outcome)


def test_the_hub_knows_why_a_stretch_was_not_reused():
    policy = msgspec.structs.replace(SETTINGS.policy, max_recompute_share=0.1)
    with played_engine(settings=msgspec.structs.replace(SETTINGS, policy=policy, recompute_ratio=0.5)) as engine:
        engine.serve("a", text(0, 64) + text(2, 96))
        engine.serve("b", text(0, 64) + text(1, 32) + text(2, 96))
        assert reported(engine, "a") == [(0, 160, Why.NOTHING_STORED)]
        assert reported(engine, "b") == [(64, 96, Why.NOTHING_STORED), (96, 191, Why.TOO_MUCH), (191, 192, Why.LAST)]


def test_what_vllm_has_is_neither_unused_nor_computed():
    with played_engine() as engine:
        engine.serve("a", text(0, 64))
        request = engine.arrived("b", text(0, 64), mode="exact")
        engine.load(request, local=32)
        engine.step(b=(63, 1))
        engine.end(request, 64)
        assert reported(engine, "b") == [(63, 64, Why.LAST)]
        off = engine.arrived("c", text(0, 64), mode="off")
        engine.load(off)
        engine.step(c=(0, 64))
        engine.end(off, 64)
        assert reported(engine, "c") == [(0, 64, Why.OFF)]


def answer(engine: PlayedEngine, request: str):
    """The hub's answer, as `blendhub explain` asks for it."""
    engine.settle()
    return engine.client.explain(request)


def test_the_hub_knows_what_became_of_a_prompt_when_its_request_has_ended(engine):
    engine.serve("a", text(0, 96))
    reuse = engine.arrived("b", text(1, 32) + text(0, 96))
    there = engine.load(reuse)
    assert engine.client.explain("b").outcome is None
    engine.step(b=(there, 128 - there))
    engine.end(reuse, 128)
    found = answer(engine, "b")
    assert found.engine == "engine" and found.outcome.prompt_tokens == 128
    # The last token is always computed.
    assert [(one.span.start, one.span.end, one.fate) for one in found.outcome.strip()] == [
        (0, 32, "hole"), (32, 127, "moved"), (127, 128, "computed"),
    ]  # fmt: skip
    (source,) = found.outcome.sources
    assert (source.span.start, source.span.end, source.source_start, source.exact) == (32, 127, 0, False)
    assert found.outcome.reason is None


def test_a_prompt_of_which_nothing_was_reused_is_reported_with_the_reason(engine):
    engine.serve("a", text(0, 64))
    outcome = answer(engine, "a").outcome
    assert fates(outcome) == ["computed"] and not outcome.sources
    assert outcome.reason == "nothing of this prompt is stored" and outcome.ended_at > 1.6e9


def test_a_failed_load_is_reported_as_computed(engine):
    engine.serve("a", text(0, 96))
    failing = engine.arrived("b", text(1, 32) + text(0, 96))
    engine.load(failing, error="the lease expired")
    engine.step(b=(0, 128))
    engine.end(failing, 128)
    outcome = answer(engine, "b").outcome
    assert fates(outcome) == ["computed"] and outcome.reason == "the lease expired" and not outcome.sources


def fates(outcome):
    return [stretch.fate for stretch in outcome.strip()]


def test_reports_that_could_not_be_sent_are_sent_with_the_next_one(engine):
    started = time.monotonic()
    with standing_still(engine.hub):
        for name in ("a", "b", "c"):
            request = engine.request(name, text(0, 32))
            tell(engine, state_of(engine, request))
        assert time.monotonic() - started < 1, "the scheduler waited for the hub"
    engine.settle()
    assert [answer(engine, name).outcome.reason for name in ("a", "b", "c")] == [None] * 3


def state_of(engine: PlayedEngine, request):
    engine.side.arrived(request)
    return engine.side._requests[request.request_id]


def test_while_the_hub_does_not_answer_the_oldest_reports_are_forgotten(engine):
    state = state_of(engine, engine.request("a", text(0, 32)))
    engine.side.executor.client.close()
    for _ in range(1000):
        tell(engine, state)
    engine.settle()
    assert len(engine.side.reports._waiting) == 256


def tell(engine: PlayedEngine, state):
    engine.side.reports.ended(state.outcome(), explains=False)
