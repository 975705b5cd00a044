"""The decision which KV of a prompt is reused, against a twin that looks at one token at a time."""

from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from blendhub import Match, Span
from blendhub.core.spans import check_tiling, join, total
from blendhub.outcome.reasons import Why
from blendhub.vllm.decision import Decision, Refusal
from blendhub.vllm.scheduler import decide as deciding
from blendhub.vllm.scheduler.decide import BlendTerms, EngineLimits, Pace
from blendhub.vllm.settings import ReusePolicy

LENGTH = 24


def choose(matches, n_tokens, local, policy, *, blend, holes, ratio, usual_ratio, on_the_way=0, **means):
    blending = BlendTerms(blend, holes, ratio, usual_ratio)
    return deciding.decide(matches, n_tokens, local, policy, blending, EngineLimits(**means), on_the_way)


def decide(*given, **more):
    """The decision, or the refusal."""
    choice = choose(*given, **more)
    return choice.decision or choice.refusal


# Eighths are exact as floats, so that limits can be met to the token.
eighths = st.integers(0, 8).map(lambda n: n / 8)
policies = st.builds(ReusePolicy, min_reused_tokens=st.integers(1, 8), max_recompute_share=eighths)
modes = st.sampled_from([(True, True), (True, False), (False, True), (False, False)])
"""``blend`` and ``holes``: a request may be served up to the first hole only, and some models cannot do otherwise."""


@st.composite
def answers(draw):
    """What the hub may find in a prompt of LENGTH tokens: disjoint, ascending matches."""
    borders = sorted(draw(st.sets(st.integers(0, LENGTH), max_size=10)))
    found = []
    for start, end in zip(borders[::2], borders[1::2], strict=False):
        exact, settled = draw(st.sampled_from([(True, False), (False, True), (False, False)]))
        source = start if exact or settled else draw(st.sampled_from([start + 100, start + 200]))
        found.append(Match(Span(start, end), draw(st.integers(1, 2)), source, exact, settled))
    return found


def tokens_of(matches):
    """The source of each covered token."""
    return {
        match.span.start + i: (match.run, match.source_start + i, match.exact, match.settled)
        for match in matches
        for i in range(len(match.span))
    }


def positions(spans):
    return {position for span in spans for position in range(span.start, span.end)}


def unbroken(origin, first):
    """What stands before the first gap."""
    end = first
    while end in origin:
        end += 1
    return {p: source for p, source in origin.items() if p < end}


def decide_token_by_token(matches, local, policy, blend, holes, ratio, usual):
    """The reused tokens and where they come from, or the code of a refusal."""
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
        if cost / claimed > Fraction(policy.max_recompute_share):
            code = "too_much"
            origin = {p: source for p, source in origin.items() if source[2] or source[3]}
            if not holes:
                origin = unbroken(origin, first)
    return origin if len(origin) >= policy.min_reused_tokens else code


MIDDLE = [Match(Span(8, 16), 1, 108, False)]


@given(answers(), st.integers(0, LENGTH), policies, modes, eighths, eighths)
@example([Match(Span(0, LENGTH), 1, 0, True)], 0, ReusePolicy(min_reused_tokens=LENGTH - 1), (False, False), 0.0, 0.0)
@example(MIDDLE, 0, ReusePolicy(min_reused_tokens=1, max_recompute_share=0.5), (True, True), 0, 0)
@example(MIDDLE, 0, ReusePolicy(min_reused_tokens=1, max_recompute_share=0.375), (True, True), 0, 0)
@example(MIDDLE, 0, ReusePolicy(min_reused_tokens=1, max_recompute_share=0.5), (True, True), 1, 0)
@example(MIDDLE, 0, ReusePolicy(min_reused_tokens=1, max_recompute_share=0.5), (True, True), 0, 1)
def test_a_decision_is_what_a_look_at_each_token_gives(matches, local, policy, mode, ratio, usual):
    blend, holes = mode
    given = decide(matches, LENGTH, local, policy, blend=blend, holes=holes, ratio=ratio, usual_ratio=usual)
    expected = decide_token_by_token(matches, local, policy, blend, holes, ratio, usual)
    if isinstance(given, Refusal):
        assert given.why == expected
    else:
        assert tokens_of(given.matches) == expected
        assert given.ratio == ratio


@given(answers(), st.integers(0, LENGTH), st.booleans(), st.booleans(), eighths)
def test_what_is_claimed_is_tiled_and_leaves_the_last_token_to_the_engine(matches, local, blend, holes, ratio):
    policy = ReusePolicy(min_reused_tokens=1, max_recompute_share=1.0)
    given = decide(matches, LENGTH, local, policy, blend=blend, holes=holes, ratio=ratio, usual_ratio=ratio)
    if isinstance(given, Refusal):
        return
    assert local == given.start < given.end < LENGTH
    assert given.ratio == ratio
    check_tiling(given.end, given.matches)
    assert list(given.matches) == join(given.matches)
    tiles = sorted([*given.exact, *given.settled, *given.moved, *given.holes])
    assert all(len(tile) for tile in tiles)
    assert [p for tile in tiles for p in range(tile.start, tile.end)] == list(range(given.start, given.end))
    assert positions(given.exact) == {p for p, (*_, exact, _) in tokens_of(given.matches).items() if exact}
    assert positions(given.settled) == {p for p, (*_, settled) in tokens_of(given.matches).items() if settled}
    assert given.first_approximate == min(positions([*given.moved, *given.settled]), default=None)
    assert blend or not (given.moved or given.settled)
    assert holes or not given.holes


@pytest.mark.parametrize(
    "matches, local, policy, code, reason",
    [
        ([], 0, {}, "nothing_stored", "nothing of this prompt is stored"),
        ([Match(Span(0, 20), 1, 0, True)], 0, {}, "too_little", "20 tokens could be reused; policy.min_reused_tokens"),
        (
            [Match(Span(0, 90), 1, 0, True)], 80, {}, "too_little",
            "10 tokens could be reused beyond the 80 in vLLM's own cache",
        ),
        (
            [Match(Span(20, 100), 1, 0, False)], 0, {"max_recompute_share": 0.2}, "too_much",
            "blending would recompute 32%, policy.max_recompute_share is 20%",
        ),
    ],
    ids=["nothing_stored", "too_short", "mostly_cached", "too_dear"],
)  # fmt: skip
def test_a_refusal_names_the_limit_that_it_met(matches, local, policy, code, reason):
    refusal = decide(matches, 200, local, ReusePolicy(**policy), blend=True, holes=True, ratio=0.15, usual_ratio=0.15)
    assert isinstance(refusal, Refusal) and refusal.why == code
    assert reason in refusal.reason


def test_where_only_moved_text_is_stored_a_request_for_exact_text_hears_that():
    moved = [Match(Span(0, 190), 1, 50, False)]
    refusal = decide(moved, 200, 0, ReusePolicy(), blend=False, holes=True, ratio=0.15, usual_ratio=0.15)
    assert refusal.why == "nothing_exact" and refusal.reason.startswith("nothing exact is stored of this prompt")
    # vLLM's own cache has it all: another thing.
    exact = [Match(Span(0, 100), 1, 0, True)]
    refusal = decide(exact, 200, 100, ReusePolicy(), blend=False, holes=True, ratio=0.15, usual_ratio=0.15)
    assert refusal.why == "too_little"


@pytest.mark.parametrize("reused", [0, 20])
def test_text_that_is_still_coming_from_the_store_is_not_called_unknown(reused):
    found = [Match(Span(0, reused), 1, 0, True)] if reused else []
    refusal = decide(found, 200, 0, ReusePolicy(), blend=True, holes=True, ratio=0.15, usual_ratio=0.15, on_the_way=150)
    assert refusal.why == "on_the_way"
    assert "150 tokens of this prompt were still being read from the store" in refusal.reason
    assert f"{reused} others could be reused; lookup_timeout_s" in refusal.reason
    enough = [Match(Span(0, 100), 1, 0, True)]
    given = decide(enough, 200, 0, ReusePolicy(), blend=True, holes=True, ratio=0.15, usual_ratio=0.15, on_the_way=9)
    assert isinstance(given, Decision)


def test_where_blending_is_too_dear_exact_text_is_still_reused():
    exact, moved = Match(Span(0, 100), 1, 0, True), Match(Span(190, 200), 2, 0, False)
    policy = ReusePolicy(max_recompute_share=0.3)
    left_out = Refusal(Why.TOO_MUCH, "blending would recompute 46%, policy.max_recompute_share is 30%")
    choice = choose([exact, moved], 300, 0, policy, blend=True, holes=True, ratio=0.15, usual_ratio=0.15)
    assert (choice.decision, choice.refusal) == (Decision(0, 100, (exact,), 0.15), left_out)


@pytest.mark.parametrize("known, covered", [(None, 200), (1300, 200), (1299, 199), (1150, 50), (1100, 0), (0, 0)])
def test_keys_from_positions_without_a_rotation_are_not_moved(known, covered):
    exact, far = Match(Span(0, 100), 1, 0, True), Match(Span(100, 300), 2, 1100, False)
    asked = {"blend": True, "holes": True, "ratio": 0.15, "usual_ratio": 0.15}
    decision = decide([exact, far], 400, 0, ReusePolicy(), n_positions=known, **asked)
    assert decision.end == 100 + covered and total(decision.exact) == 100 and total(decision.moved) == covered


def paced(matches, full_steps, ratio=0.15, usual=0.15, **policy):
    """With an engine that computes 100 tokens a step, of which 25 may be recomputed ones beside other prompts."""
    worth, pace = ReusePolicy(min_reused_tokens=16, **policy), Pace(100, 25, 100, full_steps)
    return choose(matches, 1001, 0, worth, blend=True, holes=True, ratio=ratio, usual_ratio=usual, pace=pace)


def test_what_vllm_computes_sooner_than_it_is_blended_is_computed():
    half_is_hole = [Match(Span(0, 500), 1, 900, False), Match(Span(600, 1000), 2, 900, False)]
    # 100 + 0.15 * 900 tokens are 10 steps of 25, and 3 of 100. All are 10.
    assert paced(half_is_hole, full_steps=100).decision
    more = [Match(Span(0, 500), 1, 900, False), Match(Span(700, 1000), 2, 900, False)]
    choice = paced(more, full_steps=100)
    refusal = choice.refusal
    assert choice.decision is None and refusal.why == "too_slow"
    assert refusal.reason.startswith(
        "recomputing 320 tokens would take about 13 steps, and computing 1000 takes vLLM 10; "
    )
    # After 8 steps vLLM is done with the other prompts.
    assert paced(more, full_steps=8).decision


def test_text_that_vllm_computes_sooner_does_not_keep_exact_text_from_being_reused():
    exact, moved = Match(Span(0, 600), 1, 0, True), Match(Span(900, 1000), 2, 0, False)
    choice = paced([exact, moved], full_steps=100)
    decision = choice.decision
    assert decision.matches == (exact,) and decision.end == 600
    # It is the 400 tokens behind the exact ones that would be computed.
    assert choice.refusal.reason.startswith(
        "recomputing 315 tokens would take about 13 steps, and computing 400 takes "
    )
    # Nor is exact text behind the hole waited for.
    choice = paced([exact, Match(Span(900, 1000), 1, 900, True)], full_steps=100)
    assert choice.decision.end == 600 and "recomputing 300 tokens" in choice.refusal.reason


def test_a_request_that_wants_more_recomputed_than_usual_is_not_refused_for_its_steps():
    moved = [Match(Span(0, 1000), 1, 900, False)]
    assert paced(moved, full_steps=100, ratio=1.0).decision
    assert paced(moved, full_steps=100, ratio=1.0, usual=1.0, max_recompute_share=1.0).refusal.why == "too_slow"
