"""The decision which KV of a prompt is reused, against a twin that looks at one token at a time."""

from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from blendhub import Match, Span
from blendhub.client.wire import Found
from blendhub.core.spans import check_tiling, join, total
from blendhub.outcome.reasons import NotReused, Why
from blendhub.vllm.decision import Decision
from blendhub.vllm.scheduler import decide as deciding
from blendhub.vllm.scheduler.decide import BlendTerms, EngineLimits, Pace
from blendhub.vllm.settings import ReusePolicy
from tests.spans import matches_of, positions, tokens_of

LENGTH = 24


def decide(matches, n_tokens, local=0, mode=(True, True), ratio=0.15, usual=0.15, limits=None, **more):
    blend, holes = mode
    others = {name: more.pop(name) for name in ("on_the_way", "staying") if name in more}
    found = Found(matches=tuple(matches), **others)
    terms = BlendTerms(blend, holes, ratio, usual)
    return deciding.decide(found, n_tokens, local, ReusePolicy(**more), terms, limits or EngineLimits())


# Eighths are exact as floats, so that limits can be met to the token.
eighths = st.integers(0, 8).map(lambda n: n / 8)
MOST = Fraction(deciding.MOST_RECOMPUTED)
modes = st.sampled_from([(True, True), (True, False), (False, True), (False, False)])
"""``blend`` and ``holes``: a request may be served up to the first hole only, and some models cannot do otherwise."""


def unbroken(origin, first):
    """What stands before the first gap."""
    end = first
    while end in origin:
        end += 1
    return {position: source for position, source in origin.items() if position < end}


def decide_token_by_token(matches, local, least, mode, ratio, usual):
    """The reused tokens and where they come from, or the code of a refusal."""
    blend, holes = mode
    if not matches:
        return "too_little" if local else "nothing_stored"
    first, last = min(local, LENGTH - 1), LENGTH - 1
    origin = {p: source for p, source in tokens_of(matches).items() if first <= p < last and (blend or source[2])}
    if not holes:
        origin = unbroken(origin, first)
    code = "too_little" if blend or any(match.exact for match in matches) else "nothing_exact"
    moved = [p for p, (*_, exact, settled) in origin.items() if not (exact or settled)]
    if moved:
        claimed = max(origin) + 1 - first
        cost = claimed - len(origin) + Fraction(min(ratio, usual)) * len(moved)
        if cost / claimed > max(MOST, Fraction(min(ratio, usual))):
            code = "too_much"
            origin = {p: source for p, source in origin.items() if source[2] or source[3]}
            if not holes:
                origin = unbroken(origin, first)
    return origin if len(origin) >= least else code


LATE, LATER = ([Match(Span(start, start + 4), 1, 108, False)] for start in (16, 17))
"""They cover 20 and 21 tokens, of which 80% and 81% are a hole."""


@given(matches_of(LENGTH), st.integers(0, LENGTH), st.integers(1, LENGTH), modes, eighths, eighths)
@example([Match(Span(0, LENGTH), 1, 0, True)], 0, LENGTH - 1, (False, False), 0.0, 0.0)
@example(LATE, 0, 1, (True, True), 0, 0)
@example(LATER, 0, 1, (True, True), 0, 0)
@example(LATER, 0, 1, (True, True), 1, 0)
@example(LATER, 0, 1, (True, True), 1, 1)
def test_a_decision_is_what_a_look_at_each_token_gives(matches, local, least, mode, ratio, usual):
    choice = decide(matches, LENGTH, local, mode, ratio, usual, min_reused_tokens=least)
    expected = decide_token_by_token(matches, local, least, mode, ratio, usual)
    decision = choice.decision
    if decision is None:
        assert choice.refusal.why == expected
        return
    assert tokens_of(decision.matches) == expected and decision.ratio == ratio
    # What is claimed is tiled, and leaves the last token to the engine.
    assert local == decision.start < decision.end < LENGTH
    check_tiling(decision.end, decision.matches)
    assert list(decision.matches) == join(decision.matches)
    tiles = sorted([*decision.exact, *decision.settled, *decision.moved, *decision.holes])
    assert all(map(len, tiles)) and positions(tiles) == list(range(decision.start, decision.end))
    for kind, spans in enumerate((decision.exact, decision.settled), 2):
        assert positions(spans) == sorted(position for position, source in expected.items() if source[kind])
    approximate = positions([*decision.moved, *decision.settled])
    assert decision.first_approximate == min(approximate, default=None)
    assert (mode[0] or not approximate) and (mode[1] or not decision.holes)


EXACT_20, FAR = Match(Span(0, 20), 1, 0, True), Match(Span(100, 300), 2, 1100, False)
STAYING = (NotReused(Span(50, 150), Why.SHALLOW), NotReused(Span(200, 210), Why.NOT_DONATED))
FAR_BEHIND = Match(Span(320, 399), 2, 1100, False)


@pytest.mark.parametrize(
    "matches, arguments, why, reason",
    [
        ([], {}, "nothing_stored", "nothing of this prompt is stored"),
        ([EXACT_20], {}, "too_little", "20 tokens could be reused; policy.min_reused_tokens"),
        ([Match(Span(0, 90), 1, 0, True)], {"local": 80}, "too_little", "10 tokens could be reused beyond the 80 in"),
        ([FAR_BEHIND], {}, "too_much", "blending would recompute 83% of what it covers, with the holes in it"),
        ([FAR], {"mode": (False, True)}, "nothing_exact", "nothing exact is stored of this prompt"),
        ([], {"staying": STAYING}, "shallow", "110 tokens are not moved: it is stored only where it was computed with"),
        ([], {"staying": STAYING[1:], "local": 9}, "not_donated", "10 tokens are not moved: it is stored only of"),
        ([], {"staying": STAYING, "mode": (False, True)}, "nothing_exact", "nothing exact is stored of this prompt"),
        ([EXACT_20], {"on_the_way": (Span(50, 200),)}, "on_the_way", "150 tokens of this prompt were still being"),
    ],
)
def test_a_refusal_names_the_limit_that_it_met(matches, arguments, why, reason):
    choice = decide(matches, 400, **arguments)
    assert (choice.decision, choice.refusal.why) == (None, why) and reason in choice.refusal.reason


def test_where_blending_is_too_dear_exact_text_is_still_reused():
    exact, moved = Match(Span(0, 10), 1, 0, True), Match(Span(190, 200), 2, 0, False)
    choice = decide([exact, moved], 300, min_reused_tokens=10)
    assert choice.decision == Decision(0, 10, (exact,), 0.15)
    assert choice.refusal.reason.startswith("blending would recompute 91%")


@pytest.mark.parametrize("known, covered", [(None, 200), (1300, 200), (1299, 199), (1150, 50), (1100, 0), (0, 0)])
def test_keys_from_positions_without_a_rotation_are_not_moved(known, covered):
    decision = decide([Match(Span(0, 100), 1, 0, True), FAR], 400, limits=EngineLimits(known)).decision
    assert decision.end == 100 + covered and total(decision.exact) == 100 and total(decision.moved) == covered


def paced(matches, full_steps, **arguments):
    """With an engine that computes 100 tokens a step, of which 25 may be recomputed ones beside other prompts."""
    return decide(matches, 1001, limits=EngineLimits(pace=Pace(100, 25, 100, full_steps)), **arguments)


def test_what_vllm_computes_sooner_than_it_is_blended_is_computed():
    moved = Match(Span(0, 500), 1, 900, False)
    # 100 + 0.15 * 900 tokens are 10 steps of 25, and 3 of 100. All are 10.
    assert paced([moved, Match(Span(600, 1000), 2, 900, False)], 100).decision
    larger_hole = [moved, Match(Span(700, 1000), 2, 900, False)]
    choice = paced(larger_hole, 100)
    assert choice.decision is None and choice.refusal.why == "too_slow"
    assert "recomputing 320 tokens would take about 13 steps, and computing 1000 takes vLLM 10" in choice.refusal.reason
    # After 8 steps vLLM is done with the other prompts.
    assert paced(larger_hole, 8).decision
    # A request that wants more recomputed than usual is not refused for its steps.
    whole = [Match(Span(0, 1000), 1, 900, False)]
    assert paced(whole, 100, ratio=1.0).decision
    assert paced(whole, 100, ratio=1.0, usual=1.0).refusal.why == "too_slow"


@pytest.mark.parametrize("is_exact, n_recomputed", [(False, 315), (True, 300)])
def test_text_that_vllm_computes_sooner_does_not_keep_exact_text_from_being_reused(is_exact, n_recomputed):
    exact, behind = Match(Span(0, 600), 1, 0, True), Match(Span(900, 1000), 2, 900 if is_exact else 0, is_exact)
    choice = paced([exact, behind], 100)
    assert choice.decision.matches == (exact,) and choice.decision.end == 600
    # It is the 400 tokens behind the exact ones that would be computed.
    assert choice.refusal.reason.startswith(f"recomputing {n_recomputed} tokens would take about ")
    assert "and computing 400 takes" in choice.refusal.reason
