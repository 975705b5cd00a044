"""Spans cut for forwards, against twins that look at one token at a time."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from blendhub import Span
from blendhub.vllm.spans import batches, common, joined, total

LENGTH = 30
spans = st.tuples(st.integers(0, LENGTH), st.integers(0, LENGTH)).map(lambda ends: Span(min(ends), max(ends)))
runs = st.lists(spans, max_size=8).map(joined)


def positions(given_runs):
    return [position for run in given_runs for position in range(run.start, run.end)]


@given(st.lists(spans, max_size=8))
def test_joined_runs_are_the_same_tokens_apart_from_each_other(given_spans):
    result = joined(given_spans)
    assert positions(result) == sorted(set(positions(given_spans)))
    assert all(len(run) for run in result)
    assert all(later.start > earlier.end for earlier, later in itertools.pairwise(result))


@given(runs, st.integers(1, LENGTH), st.integers(1, 4))
def test_batches_are_full_and_in_order(given_runs, max_tokens, max_spans):
    cut = list(batches(given_runs, max_tokens, max_spans))
    assert positions(itertools.chain(*cut)) == positions(given_runs)
    assert all(len(run) for batch in cut for run in batch)
    assert all(total(batch) <= max_tokens and len(batch) <= max_spans for batch in cut)
    # One that could have taken more would cost a forward more than is needed.
    assert all(total(batch) == max_tokens or len(batch) == max_spans for batch in cut[:-1])


@given(runs, st.integers(1, LENGTH), st.integers(1, 4))
def test_a_run_is_cut_only_where_a_batch_ends(given_runs, max_tokens, max_spans):
    for batch in batches(given_runs, max_tokens, max_spans):
        assert batch == joined(batch)


@given(st.lists(spans, max_size=8))
def test_total_counts_tokens(given_spans):
    assert total(given_spans) == len(positions(given_spans))


@given(runs, runs)
def test_common_runs_are_the_tokens_that_are_in_both(some, others):
    result = common(some, others)
    assert positions(result) == sorted(set(positions(some)) & set(positions(others)))
    assert all(map(len, result))
