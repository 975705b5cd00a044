"""Spans, matches and their arithmetic, against twins that look at one token at a time; and the interval of a share."""

import itertools
import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from blendhub import Match, Span, combine
from blendhub.core.errors import InvalidInput
from blendhub.core.spans import check_tiling, gaps, join, join_spans, touching
from blendhub.outcome.agreement import wilson
from blendhub.vllm.spans import behind, cut, overlaps
from tests.spans import KINDS, matches_of, positions, spans_in, tokens_of

LENGTH = 24
spans = spans_in(LENGTH)
joined = st.lists(spans, max_size=8).map(join_spans)


@given(st.lists(matches_of(LENGTH), max_size=4))
def test_combine_takes_exact_matches_first_then_settled_ones_and_then_the_order_given(answers):
    combined = combine(answers)
    check_tiling(LENGTH, combined)
    expected = {}
    for kind, answer in itertools.product(KINDS, answers):
        for position, token in tokens_of(answer).items():
            if token[2:] == kind:
                expected.setdefault(position, token)
    assert tokens_of(combined) == expected
    assert combined == join(combined)


@given(matches_of(LENGTH))
def test_join_changes_no_token_and_leaves_nothing_to_join(answer):
    result = join(answer)
    assert tokens_of(result) == tokens_of(answer)
    assert not any(later.continues(earlier) for earlier, later in itertools.pairwise(result))


@given(st.lists(spans, max_size=8))
def test_joined_spans_are_the_same_tokens_apart_from_each_other(drawn):
    result = join_spans(drawn)
    assert positions(result) == sorted(set(positions(drawn))) and all(map(len, result))
    assert all(later.start > earlier.end for earlier, later in itertools.pairwise(result))


@given(spans, st.lists(spans, max_size=6).map(sorted))
@example(Span(0, 2), [Span(1, 1)])
def test_gaps_are_what_no_span_covers(whole, covered):
    result = list(gaps(whole, covered))
    assert positions(result) == sorted(set(positions([whole])) - set(positions(covered)))
    assert result == join_spans(result)


@given(spans.filter(len), joined)
def test_spans_that_touch_another_one_share_a_position_with_it(whole, some):
    assert touching(whole, some) == [span for span in some if set(positions([span])) & set(positions([whole]))]


@given(joined, joined, st.integers(0, LENGTH + 5))
def test_spans_are_cut_and_compared_token_by_token(some, others, n):
    first = cut(some, n)
    assert positions(first) == positions(some)[:n] and first == join_spans(first)
    rest = behind(some, n)
    assert positions(rest) == [at for at in positions(some) if at >= n] and all(map(len, rest))
    common = [span for _, _, span in overlaps(some, others)]
    assert positions(common) == sorted({*positions(some)} & {*positions(others)}) and all(map(len, common))


@given(st.lists(st.tuples(spans, st.integers(0, 3)), max_size=5), st.integers(0, LENGTH))
def test_a_tiling_is_disjoint_ascending_and_within_the_prompt(drawn, length):
    matches = [Match(span, run, span.start, False) for span, run in drawn]
    covered = positions(match.span for match in matches)
    is_tiling = (
        all(len(match.span) for match in matches)
        and covered == sorted(set(covered))
        and all(position < length for position in covered)
    )
    if is_tiling:
        check_tiling(length, matches)
    else:
        with pytest.raises(InvalidInput, match="must not be empty, start at"):
            check_tiling(length, matches)


def test_a_span_does_not_end_before_it_starts_and_part_of_a_match_keeps_its_source():
    for start, end in ((-1, 3), (4, 3), (-2, -1)):
        with pytest.raises(InvalidInput, match="0 <= start <= end"):
            Span(start, end)
    match = Match(Span(10, 20), 3, 110, False)
    assert match.part(12, 15) == Match(Span(12, 15), 3, 112, False)
    for start, end in ((9, 12), (12, 21), (15, 12)):
        with pytest.raises(InvalidInput, match="is not part of"):
            match.part(start, end)


@given(st.integers(0, 400), st.integers(0, 400), st.floats(0.5, 4))
def test_wilson_s_interval_ends_at_the_shares_from_which_the_observed_one_is_as_far_as_allowed(
    agreed, disagreed, quantile
):
    audits = agreed + disagreed
    interval = wilson(agreed, audits, quantile)
    if not audits:
        assert interval == (0, 1)
        return
    assert 0 <= interval.low <= agreed / audits <= interval.high <= 1
    for end in interval:
        if 0 < end < 1:
            reach = quantile * math.sqrt(end * (1 - end) / audits)
            assert abs(agreed / audits - end) == pytest.approx(reach, rel=1e-6, abs=1e-9)
