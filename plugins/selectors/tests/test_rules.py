"""Each selector picks by its own rule, held against a twin that goes through the tokens one by one."""

from math import ceil, inf, isfinite

import numpy as np
import pytest
from blendhub_selectors.attended import AttendedSelector
from blendhub_selectors.first_k import FirstKSelector
from blendhub_selectors.hkvd import HkvdSelector
from blendhub_selectors.options import AttendedOptions, FirstKOptions, HkvdOptions
from hypothesis import given
from hypothesis import strategies as st

from blendhub import Span
from blendhub.contracts import Selection


def tokens(spans):
    return [position for span in spans for position in range(span.start, span.end)]


@st.composite
def moved_spans(draw):
    spans, at = [], 0
    for gap, length in draw(st.lists(st.tuples(st.sampled_from([0, 0, 3]), st.integers(1, 20)), min_size=1)):
        spans.append(Span(at + gap, at + gap + length))
        at = spans[-1].end
    return spans


# Small integers: their sums are the same in any order.
SCORES = st.lists(st.sampled_from([0.0, 1.0, 2.0, 7.0, inf, -inf, float("nan")]), min_size=1, max_size=40)
RATIOS = st.floats(0, 1)


def numbers(scores, moved):
    """Makes a score for each token of the prompt."""
    return np.resize(np.array(scores, np.float32), moved[-1].end)


def picked_in_turn(moved, ratio, windows):
    """The moved positions of windows, taken whole one after the other until one is too dear."""
    may = set(tokens(moved))
    budget = ceil(ratio * len(may))
    picked = set()
    for window in windows:
        more = picked | (may & set(window))
        if len(more) > budget:
            break
        picked = more
    return sorted(picked)


def blocks_of(moved, width):
    return [
        range(start, min(start + width, span.end)) for span in moved for start in range(span.start, span.end, width)
    ]


@given(scores=SCORES, moved=moved_spans(), ratio=RATIOS, width=st.sampled_from([1, 2, 16, 18]))
def test_hkvd_picks_the_highest_blocks(scores, moved, ratio, width):
    scores = numbers(scores, moved)

    def mean(block):
        values = [float(scores[position]) for position in block]
        return sum(values) / len(values) if all(map(isfinite, values)) else inf

    best_first = sorted(blocks_of(moved, width), key=mean, reverse=True)  # keeps the order of equals
    expected = sorted([at for block in best_first for at in block][: ceil(ratio * len(tokens(moved)))])
    given = [(HkvdOptions(block_tokens=width), 5), *[(HkvdOptions(), width)] * (width >= 16)]
    given += [(HkvdOptions(), 1)] * (width == 16)
    for options, block_tokens in given:
        assert tokens(HkvdSelector(options).select(Selection(moved, ratio, block_tokens, scores))) == expected


@pytest.mark.parametrize("signal", ["k", "v", "kv"])
def test_hkvd_scores_are_squared_distances(signal):
    torch = pytest.importorskip("torch", reason="scores are taken of tensors: pip install torch")
    fresh, stored = ((torch.rand(5, 2, 8), torch.rand(5, 2, 12)) for _ in range(2))
    selector = HkvdSelector(HkvdOptions(signal=signal, layer=7))
    assert selector.probe_layer == 7
    distances = [(new - old).square().sum((1, 2)) for new, old in zip(fresh, stored, strict=True)]
    expected = sum(distance for distance, name in zip(distances, "kv", strict=True) if name in signal)
    torch.testing.assert_close(selector.score(fresh, stored), expected)


def in_turn(moved, *lists):
    """The windows of all lists, each time the next one of a list whose windows have fewest moved tokens until then."""
    counted = []
    for windows in lists:
        held = set()
        for window in windows:
            held |= set(window) & set(tokens(moved))
            counted.append((len(held), window))
    return [window for _, window in sorted(counted, key=lambda pair: pair[0])]


@given(scores=SCORES, moved=moved_spans(), ratio=RATIOS, width=st.integers(1, 9))
def test_windows_are_picked_from_the_highest_tokens_on_and_half_of_what_is_attended_to_are_beginnings(
    scores, moved, ratio, width
):
    scores = numbers(scores, moved)
    highest = sorted(tokens(moved), key=lambda at: -scores[at] if isfinite(scores[at]) else -inf)
    windows = [range(at, at + width) for at in highest]
    by_scores = HkvdSelector(HkvdOptions(window_tokens=width)).select(Selection(moved, ratio, 16, scores))
    assert tokens(by_scores) == picked_in_turn(moved, ratio, windows)
    # The first ``width`` tokens of each span, then the next of each, and so on.
    blocks = sorted(
        (block.start - span.start, block.start, block) for span in moved for block in blocks_of([span], width)
    )
    heads = [block for *_, block in blocks]
    expected = picked_in_turn(moved, ratio, in_turn(moved, windows, heads))
    by_attention = AttendedSelector(AttendedOptions(window_tokens=width))
    assert tokens(by_attention.select(Selection(moved, ratio, attended=scores))) == expected
    by_default = AttendedSelector(AttendedOptions()).select(Selection(moved, ratio, width, attended=scores))
    assert tokens(by_default) == expected
    # Where attention is not measured, all are beginnings.
    assert tokens(by_attention.select(Selection(moved, ratio))) == picked_in_turn(moved, ratio, heads)


@given(moved=moved_spans(), ratio=st.floats(0, 1, exclude_min=True, exclude_max=True), k=st.integers(1, 25))
def test_first_k_picks_the_beginning_of_every_span(moved, ratio, k):
    expected = [position for span in moved for position in range(span.start, span.end)[:k]]
    assert tokens(FirstKSelector(FirstKOptions(k=k)).select(Selection(moved, ratio))) == expected


@given(moved=moved_spans(), ratio=RATIOS)
def test_first_k_of_0_picks_equally_many_of_each_span(moved, ratio):
    """One token more of a span than of another only because the budget ended, or the other span did."""
    picked = set(tokens(FirstKSelector(FirstKOptions(k=0)).select(Selection(moved, ratio))))
    assert len(picked) == ceil(ratio * len(tokens(moved)))
    counts = [sum(at in picked for at in range(span.start, span.end)) for span in moved]
    assert all(set(range(span.start, span.start + n)) <= picked for span, n in zip(moved, counts, strict=True))
    assert all(n in (max(counts), max(counts) - 1, len(span)) for span, n in zip(moved, counts, strict=True))
