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


def highest_blocks(moved, ratio, width, scores):
    """What hkvd must pick, token by token."""

    def mean(block):
        values = [float(scores[position]) for position in block]
        return sum(values) / len(values) if all(map(isfinite, values)) else inf

    best_first = sorted(blocks_of(moved, width), key=mean, reverse=True)  # keeps the order of equals
    budget = ceil(ratio * len(tokens(moved)))
    return sorted([position for block in best_first for position in block][:budget])


# Small integers: their sums are the same in any order.
SCORES = st.sampled_from([0.0, 1.0, 2.0, 7.0, inf, -inf, float("nan")])


@given(data=st.data(), moved=moved_spans(), ratio=st.floats(0, 1), width=st.sampled_from([1, 2, 3, 8, 16]))
def test_hkvd_picks_the_highest_blocks(data, moved, ratio, width):
    end = moved[-1].end
    scores = np.array(data.draw(st.lists(SCORES, min_size=end, max_size=end)), np.float32)
    expected = highest_blocks(moved, ratio, width, scores)
    assert tokens(HkvdSelector(HkvdOptions()).select(Selection(moved, ratio, width, scores))) == expected
    in_blocks = HkvdSelector(HkvdOptions(block_tokens=width))
    assert tokens(in_blocks.select(Selection(moved, ratio, 5, scores))) == expected


@pytest.mark.parametrize("signal", ["k", "v", "kv"])
def test_hkvd_scores_are_squared_distances(signal):
    torch = pytest.importorskip("torch", reason="scores are taken of tensors: pip install torch")
    fresh, stored = ((torch.rand(5, 2, 8), torch.rand(5, 2, 12)) for _ in range(2))
    selector = HkvdSelector(HkvdOptions(signal=signal, layer=7))
    assert selector.probe_layer == 7
    score = selector.score(fresh, stored)
    for token in range(5):
        of_keys = sum((a - b) ** 2 for a, b in zip(fresh[0][token].ravel(), stored[0][token].ravel(), strict=True))
        of_values = sum((a - b) ** 2 for a, b in zip(fresh[1][token].ravel(), stored[1][token].ravel(), strict=True))
        expected = of_keys * ("k" in signal) + of_values * ("v" in signal)
        assert score[token].item() == pytest.approx(expected.item(), rel=1e-5)


def windows_from_the_highest(moved, ratio, width, scores):
    """What hkvd must pick with windows."""
    highest = sorted(tokens(moved), key=lambda at: -scores[at] if isfinite(scores[at]) else -inf)
    return picked_in_turn(moved, ratio, [range(at, at + width) for at in highest])


@given(data=st.data(), moved=moved_spans(), ratio=st.floats(0, 1), width=st.integers(1, 9))
def test_hkvd_picks_windows_from_the_highest_tokens_on(data, moved, ratio, width):
    end = moved[-1].end
    scores = np.array(data.draw(st.lists(SCORES, min_size=end, max_size=end)), np.float32)
    picks = HkvdSelector(HkvdOptions(window_tokens=width)).select(Selection(moved, ratio, 16, scores))
    assert tokens(picks) == windows_from_the_highest(moved, ratio, width, scores)


@given(data=st.data(), moved=moved_spans(), ratio=st.floats(0, 1), width=st.integers(1, 9))
def test_attended_picks_what_is_attended_to_most(data, moved, ratio, width):
    end = moved[-1].end
    numbers = np.array(data.draw(st.lists(SCORES, min_size=end, max_size=end)), np.float32)
    picks = AttendedSelector(AttendedOptions(window_tokens=width)).select(Selection(moved, ratio, attended=numbers))
    assert tokens(picks) == windows_from_the_highest(moved, ratio, width, numbers)
    if width == 1:
        assert len(tokens(picks)) == ceil(ratio * len(tokens(moved)))


@given(moved=moved_spans(), ratio=st.floats(0, 1), width=st.sampled_from([1, 2, 4, 7]))
def test_attended_picks_beginnings_where_attention_is_not_measured(moved, ratio, width):
    """The first ``width`` tokens of each span, then the next of each, and so on."""
    heads = sorted(
        (block.start - span.start, block.start, block) for span in moved for block in blocks_of([span], width)
    )
    picks = AttendedSelector(AttendedOptions(window_tokens=width)).select(Selection(moved, ratio))
    assert tokens(picks) == picked_in_turn(moved, ratio, [block for *_, block in heads])


@given(moved=moved_spans(), ratio=st.floats(0, 1, exclude_min=True, exclude_max=True), k=st.integers(1, 25))
def test_first_k_picks_the_beginning_of_every_span(moved, ratio, k):
    expected = [position for span in moved for position in range(span.start, span.end)[:k]]
    assert tokens(FirstKSelector(FirstKOptions(k=k)).select(Selection(moved, ratio))) == expected


@given(moved=moved_spans(), ratio=st.floats(0, 1))
def test_first_k_of_0_picks_equally_many_of_each_span(moved, ratio):
    """One token more of a span than of another only because the budget ended, or the other span did."""
    picked = set(tokens(FirstKSelector(FirstKOptions(k=0)).select(Selection(moved, ratio))))
    assert len(picked) == ceil(ratio * len(tokens(moved)))
    counts = [sum(at in picked for at in range(span.start, span.end)) for span in moved]
    assert all(set(range(span.start, span.start + n)) <= picked for span, n in zip(moved, counts, strict=True))
    assert all(n in (max(counts), max(counts) - 1, len(span)) for span, n in zip(moved, counts, strict=True))
