"""Spans, matches and their combination, against twins that look at one token at a time."""

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from blendhub import Match, Span, combine
from blendhub.core.errors import InvalidInput
from blendhub.core.spans import check_tiling, gaps, join

LENGTH = 24
KINDS = [(True, False), (False, True), (False, False)]
"""Whether a match is exact, and whether it is settled, in the order in which matches are preferred."""

spans = st.tuples(st.integers(0, LENGTH), st.integers(0, LENGTH)).map(lambda ends: Span(min(ends), max(ends)))


@st.composite
def answers(draw):
    """What one matcher may answer: disjoint, ascending matches of a prompt of LENGTH tokens."""
    borders = sorted(draw(st.sets(st.integers(0, LENGTH), max_size=10)))
    found = []
    for start, end in zip(borders[::2], borders[1::2], strict=False):
        # Few runs and sources, so that neighbours often continue each other.
        source = draw(st.sampled_from([start, start, 0, 100 + start]))
        found.append(Match(Span(start, end), draw(st.integers(1, 2)), source, *draw(st.sampled_from(KINDS))))
    return found


def tokens_of(matches):
    """The source of each covered token."""
    return {
        match.span.start + i: (match.run, match.source_start + i, match.exact, match.settled)
        for match in matches
        for i in range(len(match.span))
    }


def combine_token_by_token(given_answers):
    origin = {}
    for kind in KINDS:
        for answer in given_answers:
            for match in answer:
                if (match.exact, match.settled) == kind:
                    for position in range(match.span.start, match.span.end):
                        source = match.source_start + position - match.span.start
                        origin.setdefault(position, (match.run, source, *kind))
    return origin


@given(st.lists(answers(), max_size=4))
def test_combine_takes_exact_matches_first_then_settled_ones_and_then_the_order_given(given_answers):
    combined = combine(given_answers)
    check_tiling(LENGTH, combined)
    assert tokens_of(combined) == combine_token_by_token(given_answers)
    assert combined == join(combined)


@given(answers())
def test_join_changes_no_token_and_leaves_nothing_to_join(answer):
    joined = join(answer)
    assert tokens_of(joined) == tokens_of(answer)
    assert not any(later.continues(earlier) for earlier, later in itertools.pairwise(joined))


@given(spans, st.lists(spans, max_size=6).map(sorted))
@example(Span(0, 2), [Span(1, 1)])
def test_gaps_are_what_no_span_covers(whole, covered):
    found = list(gaps(whole, covered))
    open_tokens = {position for gap in found for position in range(gap.start, gap.end)}
    expected = set(range(whole.start, whole.end)) - {p for span in covered for p in range(span.start, span.end)}
    assert open_tokens == expected
    assert all(len(gap) for gap in found)
    assert all(later.start > earlier.end for earlier, later in itertools.pairwise(found))


@given(st.lists(st.tuples(spans, st.integers(0, 3)), max_size=5), st.integers(0, LENGTH))
def test_a_tiling_is_disjoint_ascending_not_empty_and_inside(pieces, length):
    matches = [Match(span, run, 0, False) for span, run in pieces]
    positions = [p for span, _ in pieces for p in range(span.start, span.end)]
    sound = all(len(span) for span, _ in pieces) and positions == sorted(set(positions))
    if sound and all(position < length for position in positions):
        check_tiling(length, matches)
    else:
        with pytest.raises(InvalidInput):
            check_tiling(length, matches)


def test_overlapping_matches_are_refused_with_the_limits():
    with pytest.raises(InvalidInput, match="must not be empty, start at 5 or later, and end at 24 or earlier"):
        check_tiling(LENGTH, [Match(Span(0, 5), 1, 0, False), Match(Span(4, 9), 1, 4, False)])


@pytest.mark.parametrize("start, end", [(-1, 3), (4, 3), (-2, -1)])
def test_a_span_cannot_end_before_it_starts(start, end):
    with pytest.raises(InvalidInput, match="0 <= start <= end"):
        Span(start, end)


def test_part_of_a_match_keeps_its_source():
    match = Match(Span(10, 20), 3, 110, False)
    assert match.part(12, 15) == Match(Span(12, 15), 3, 112, False)
    for start, end in ((9, 12), (12, 21), (15, 12)):
        with pytest.raises(InvalidInput, match="is not part of"):
            match.part(start, end)
