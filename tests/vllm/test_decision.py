"""The decision which KV of a prompt is reused, against a twin that looks at one token at a time."""

from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from blendhub import Match, Span
from blendhub.client.wire import Found
from blendhub.core.spans import check_tiling, join, total
from blendhub.outcome.reasons import NotReused, Why
from blendhub.vllm.costs import GROWTH_FROM, Cost, Costs
from blendhub.vllm.decision import Decision
from blendhub.vllm.scheduler import decide as deciding
from blendhub.vllm.scheduler.decide import Limits
from tests.spans import matches_of, positions, tokens_of

LENGTH = 24


def decide(matches, n_tokens, local=0, mode=(True, True), ratio=0.15, usual=0.15, **more):
    blend, holes = mode
    others = {name: more.pop(name) for name in ("on_the_way", "staying") if name in more}
    found = Found(matches=tuple(matches), **others)
    limits = Limits(ratio, usual, 0 if blend else None, holes, **more)
    return deciding.decide(found, n_tokens, local, limits)


# Eighths are exact as floats, so that limits can be met to the token.
eighths = st.integers(0, 8).map(lambda n: n / 8)
MOST = Fraction(deciding.MAX_RECOMPUTED)
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
        assert choice.refusal.code == expected
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
    assert (choice.decision, choice.refusal.code) == (None, why) and reason in choice.refusal.message


@pytest.mark.parametrize("known, covered", [(None, 200), (1300, 200), (1299, 199), (1150, 50), (1100, 0), (0, 0)])
def test_keys_from_positions_without_a_rotation_are_not_moved(known, covered):
    decision = decide([Match(Span(0, 100), 1, 0, True), FAR], 400, n_positions=known).decision
    assert decision.end == 100 + covered and total(decision.exact) == 100 and total(decision.moved) == covered


def test_where_a_token_s_kv_depends_on_the_next_one_the_end_of_what_is_reused_is_computed():
    exact, moved, end = (
        Match(Span(0, 50), 1, 0, True),
        Match(Span(60, 99), 2, 0, False),
        Match(Span(99, 100), 3, 0, False),
    )
    choice = decide([exact, moved, end], 300, min_reused_tokens=1, looks_ahead=True)
    assert choice.decision == Decision(0, 98, (exact, moved.part(60, 98)), 0.15)
    assert NotReused(Span(98, 99), Why.LAST) in choice.unused
    choice = decide([exact], 300, min_reused_tokens=1, looks_ahead=True)
    assert choice.decision.end == 49


UNIT = 2.0**-10
COSTS = Costs(
    prefill=Cost(UNIT, measured=((10 * UNIT, 10 * UNIT),)),
    probe=Cost(UNIT / 100, measured=((20 * UNIT, 20 * UNIT),)),
    recompute=Cost(UNIT, measured=((10 * UNIT, 10 * UNIT),)),
    load=Cost(UNIT / 100, measured=((UNIT, UNIT),)),
    token_bytes=1000.0,
    engine_tokens=1000,
    step=5 * UNIT,
)
"""A token takes about a millisecond. What a blend takes in any case is 15 for steps, 20 for its probe and 10; all of
that a quarter longer in service."""


def timed(matches, n_tokens=1001, **arguments):
    return decide(matches, n_tokens, costs=COSTS, **arguments)


@pytest.mark.parametrize("n_moved, pays", [(39, False), (100, True)])
def test_what_is_sooner_computed_than_blended_is_computed(n_moved, pays):
    """By hand: with reuse 10 for the question, and 1.25 times 15, 1, 20 and 10; without a unit a token."""
    choice = timed([Match(Span(0, n_moved), 1, 900, False)], n_moved + 5)
    assert bool(choice.decision) is pays
    if not pays:
        assert choice.refusal.code == "too_slow" and choice.unused[0].code == "too_slow"
        expected = "about 65.9 ms with reuse up to token 39, and 43.0 ms without; policy.min_reused_tokens"
        assert expected in choice.refusal.message
    # A number of tokens decides where times could not be measured, or it was asked for.
    assert bool(decide([Match(Span(0, n_moved), 1, 900, False)], n_moved + 5).decision) is pays


def test_a_request_that_wants_more_recomputed_than_usual_is_not_refused_for_it():
    whole = [Match(Span(0, 1000), 1, 900, False)]
    assert timed(whole, ratio=1.0).decision and not timed(whole, ratio=1.0, usual=1.0).decision


lengths = st.lists(st.integers(2, 5000), min_size=3, max_size=5, unique=True).map(sorted)


@given(lengths, st.floats(1e-6, 1e-3), st.floats(1e-9, 1e-6), st.floats(0.1, 1))
def test_costs_are_those_that_were_measured_and_attention_grows_with_what_is_before(lengths, token, growth, share):
    def seconds(n):
        return share * (token * n + growth * n * n / 2)

    grows = lengths[-1] >= GROWTH_FROM
    fitted = Cost.fitted([(n, seconds(n)) for n in lengths], share)
    for n in lengths:
        assert fitted.seconds(share * fitted.sum([Span(0, n)])) == pytest.approx(seconds(n))
    assert fitted.seconds(0.0, 3) == pytest.approx(3 * seconds(lengths[0]))
    if grows and lengths[-1] > lengths[-2] + 100:
        assert (fitted.token, fitted.growth) == pytest.approx((token, growth), rel=1e-3, abs=1e-9)
        halves = [Span(0, 4000), Span(4000, 8000)]
        assert sum(fitted.sum([half]) for half in halves) == pytest.approx(fitted.sum([Span(0, 8000)]))
    if not grows:
        assert fitted.growth == 0


# No clock tells subnormal times, whose quotients overflow.
@given(lengths, st.lists(st.floats(0, 1, allow_subnormal=False), min_size=5, max_size=5))
def test_whatever_is_measured_no_token_takes_less_than_no_time(lengths, seconds):
    fitted = Cost.fitted(list(zip(lengths, seconds, strict=False)))
    assert fitted.token >= -1e-15 and fitted.growth >= 0
    assert all(fitted.seconds(fitted.sum([Span(0, n)])) >= 0 for n in (1, 100, 10_000))
