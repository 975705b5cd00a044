"""Spans cut for forwards, against twins that look at one token at a time."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from blendhub import Span
from blendhub.core.spans import join_spans
from blendhub.vllm.spans import behind, cut, overlaps

LENGTH = 30
spans = st.tuples(st.integers(0, LENGTH), st.integers(0, LENGTH)).map(lambda ends: Span(min(ends), max(ends)))
runs = st.lists(spans, max_size=8).map(join_spans)


def positions(given_runs):
    return [position for run in given_runs for position in range(run.start, run.end)]


@given(st.lists(spans, max_size=8))
def test_joined_runs_are_the_same_tokens_apart_from_each_other(given_spans):
    result = join_spans(given_spans)
    assert positions(result) == sorted(set(positions(given_spans)))
    assert all(len(run) for run in result)
    assert all(later.start > earlier.end for earlier, later in itertools.pairwise(result))


@given(runs, st.integers(0, LENGTH + 5))
def test_a_cut_has_the_first_tokens_and_is_full(given_runs, n):
    taken = cut(given_runs, n)
    assert positions(taken) == positions(given_runs)[:n]
    assert taken == join_spans(taken)


@given(runs, st.integers(0, LENGTH))
def test_behind_a_position_stands_the_rest(given_runs, position):
    left = behind(given_runs, position)
    assert positions(left) == [one for one in positions(given_runs) if one >= position]
    assert all(map(len, left))


@given(runs, runs)
def test_common_runs_are_the_tokens_that_are_in_both(some, others):
    result = [span for _, _, span in overlaps(some, others)]
    assert positions(result) == sorted(set(positions(some)) & set(positions(others)))
    assert all(map(len, result))
