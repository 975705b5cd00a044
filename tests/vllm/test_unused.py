"""Why stored KV of a prompt was not reused: what the scheduler's decisions say of each stretch."""

import msgspec
import numpy as np
import pytest

pytest.importorskip("vllm", reason="the adapter's tests need vLLM; `make setup` installs it")

from blendhub.client.wire import Found
from blendhub.core.spans import Match, Span
from blendhub.outcome.fates import Fate, Stretch
from blendhub.outcome.reasons import Why, not_reused
from blendhub.vllm.decision import Allowed, Decision, Refusal
from blendhub.vllm.scheduler.decide import decide
from blendhub.vllm.scheduler.step_budget import Pace
from blendhub.vllm.scheduler.unused import Attempt, why_unused
from blendhub.vllm.settings import ReusePolicy
from tests.vllm.played_engine import SETTINGS, played_engine, text

LENGTH = 1000
EXACT = Match(Span(0, 200), 1, 0, True)
MOVED = Match(Span(300, 900), 2, 0, False)
FAR = Match(Span(300, 900), 2, 3800, False)
BEHIND = Match(Span(600, 1000), 1, 600, True)


def outcome(*matches, blend=True, holes=True, local=0, pace=None, on_the_way=(), **policy):
    """The reasons in the report of a request of 1000 tokens, for those that it computes: from decision to report."""
    allowed = Allowed(local, blend, holes, 4096)
    found = Found(matches=matches, on_the_way=on_the_way, on_the_way_tokens=sum(map(len, on_the_way)))
    given = decide(
        matches, LENGTH, local, ReusePolicy(**policy), blend=blend, holes=holes, ratio=0.15, usual_ratio=0.15,
        on_the_way=found.on_the_way_tokens, n_positions=4096, pace=pace,
    )  # fmt: skip
    is_loaded = isinstance(given, Decision)
    attempt = Attempt(found, allowed, given if is_loaded else None, None if is_loaded else given, is_loaded, False)
    return shown(attempt, [match.span for match in given.matches] if is_loaded else [], local)


def shown(attempt: Attempt, reused=(), local=0):
    used = {position for span in reused for position in range(span.start, span.end)} | set(range(local))
    plan = [Stretch(Span(p, p + 1), Fate.MOVED if p in used else Fate.COMPUTED) for p in range(LENGTH - 1)]
    plan.append(Stretch(Span(LENGTH - 1, LENGTH), Fate.COMPUTED))
    return [(one.span.start, one.span.end, one.why) for one in not_reused(plan, why_unused(attempt, LENGTH))]


def test_where_all_that_was_found_is_reused_the_rest_is_not_stored():
    assert outcome(EXACT, MOVED) == [(200, 300, Why.NOT_STORED), (900, 1000, Why.NOT_STORED)]


def test_what_is_still_read_from_the_store_is_said_to_be():
    assert outcome(EXACT, on_the_way=(Span(250, 300),)) == [
        (200, 250, Why.NOT_STORED), (250, 300, Why.ON_THE_WAY), (300, 1000, Why.NOT_STORED),
    ]  # fmt: skip


def test_the_last_token_is_computed_although_it_is_stored():
    assert outcome(Match(Span(0, LENGTH), 1, 0, True)) == [(999, 1000, Why.LAST)]


def test_moved_text_that_a_request_may_not_use():
    assert outcome(EXACT, MOVED, blend=False)[1] == (300, 900, Why.NOT_MOVED)


def test_keys_that_the_rotation_does_not_reach():
    assert outcome(EXACT, FAR) == [(200, 300, Why.NOT_STORED), (596, 900, Why.BEYOND), (900, 1000, Why.NOT_STORED)]


def test_what_stands_behind_a_hole_where_no_holes_are_computed():
    assert outcome(EXACT, MOVED, holes=False)[1] == (300, 900, Why.BEHIND_HOLE)


def test_what_would_be_recomputed_too_much_is_told_from_what_stands_behind_a_hole():
    close = Match(Span(200, 300), 2, 0, False)
    of_both = outcome(EXACT, close, BEHIND, holes=False, max_recompute_share=0.01)
    assert of_both == [(200, 300, Why.TOO_MUCH), (300, 600, Why.NOT_STORED), (600, 999, Why.BEHIND_HOLE),
                       (999, 1000, Why.LAST)]  # fmt: skip


def test_a_refusal_is_the_reason_of_all_that_was_found():
    assert outcome(MOVED, max_recompute_share=0.1)[1] == (300, 900, Why.TOO_MUCH)
    assert outcome(MOVED, min_reused_tokens=2000)[1] == (300, 900, Why.TOO_LITTLE)
    assert outcome(MOVED, pace=Pace(100, 1, 100, 1000))[1] == (300, 900, Why.TOO_SLOW)
    assert outcome(EXACT, MOVED, max_recompute_share=0.0, min_reused_tokens=250) == [
        (0, 200, Why.TOO_LITTLE), (200, 300, Why.NOT_STORED), (300, 900, Why.TOO_MUCH), (900, 1000, Why.NOT_STORED),
    ]  # fmt: skip
    assert outcome(EXACT, min_reused_tokens=300, on_the_way=(Span(300, 400),))[0] == (0, 200, Why.TOO_LITTLE)


def test_exact_text_behind_a_hole_that_takes_too_long():
    found = outcome(EXACT, BEHIND, pace=Pace(100, 1, 100, 1000))
    assert found[1] == (600, 999, Why.TOO_SLOW)


@pytest.mark.parametrize(
    "ended, why",
    [
        ({"has_failed": True}, Why.FAILED),
        ({"refusal": Refusal("other_connector", "another one loads it")}, Why.REFUSED),
        ({}, Why.ENDED),
    ],
)
def test_what_became_of_a_request_after_it_was_decided(ended, why):
    attempt = Attempt(Found(matches=(EXACT,)), Allowed(0, True, True, 4096), None, None, False, False)._replace(**ended)
    assert shown(attempt)[0] == (0, 200, why)
    assert shown(attempt._replace(allowed=None))[0] == (0, 200, why)


def test_a_prompt_that_was_not_looked_up():
    assert shown(Attempt(None, None, None, Refusal("off", "mode is off"), False, False)) == [(0, 1000, Why.NOT_ASKED)]


# Through the scheduler side and a real hub.


def reported(engine, name):
    engine.settle()
    report = engine.client.explain(name).report
    return [(one.span.start, one.span.end, one.why) for one in report.not_reused]


def test_the_hub_knows_why_a_stretch_was_not_reused():
    policy = msgspec.structs.replace(SETTINGS.policy, max_recompute_share=0.1)
    with played_engine(settings=msgspec.structs.replace(SETTINGS, policy=policy, recompute_ratio=0.5)) as engine:
        engine.serve("a", text(0, 64) + text(2, 96))
        engine.serve("b", text(0, 64) + text(1, 32) + text(2, 96))
        assert reported(engine, "a") == [(0, 160, Why.NOT_STORED)]
        assert reported(engine, "b") == [(64, 96, Why.NOT_STORED), (96, 191, Why.TOO_MUCH), (191, 192, Why.LAST)]


def test_what_vllm_has_is_neither_unused_nor_computed():
    with played_engine() as engine:
        engine.serve("a", text(0, 64))
        request = engine.request("b", text(0, 64), mode="exact")
        engine.side.arrived(request)
        engine.load(request, local=32)
        engine.step(b=(63, 1))
        engine.end(request, 64)
        assert reported(engine, "b") == [(63, 64, Why.LAST)]
        off = engine.request("c", text(0, 64), mode="off")
        engine.side.arrived(off)
        engine.load(off)
        engine.step(c=(0, 64))
        engine.end(off, 64)
        assert reported(engine, "c") == [(0, 64, Why.NOT_ASKED)]


def test_a_prompt_of_a_million_tokens_and_all_its_matches_are_explained_in_a_moment():
    matches = tuple(Match(Span(at, at + 128), 1, at, False) for at in range(0, 2**20, 256))
    attempt = Attempt(
        Found(matches=matches), Allowed(0, True, True, 2**20), None, Refusal("too_much", "much"), False, False
    )
    whys = why_unused(attempt, 2**20)
    found = not_reused([Stretch(Span(0, 2**20), Fate.COMPUTED)], whys)
    assert len(found) == 2 * len(matches)
    assert np.all([len(one.span) == 128 for one in found])
