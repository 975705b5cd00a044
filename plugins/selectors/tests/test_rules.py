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

from blendhub import PluginHost, Span
from blendhub.contracts import Selection
from blendhub.core.errors import OptionError
from plugins.selectors.tests.prompts import moved_spans, picked_in_turn, tokens

TOUCHING = [Span(4, 10), Span(10, 13), Span(13, 40)]


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


def test_hkvd_takes_the_earlier_of_equals():
    picks = HkvdSelector(HkvdOptions()).select(Selection(TOUCHING, 0.2, 4, np.ones(40, np.float32)))
    assert picks == [Span(4, 12)]


def test_blocks_end_where_their_span_does():
    """The block [8, 10) is short, and [10, 13) begins anew though it touches."""
    scores = np.zeros(40, np.float32)
    scores[10:13] = 1
    assert HkvdSelector(HkvdOptions()).select(Selection(TOUCHING, 3 / 36, 4, scores)) == [Span(10, 13)]


@pytest.mark.parametrize("signal", ["k", "v", "kv"])
def test_hkvd_scores_are_squared_distances(signal):
    torch = pytest.importorskip("torch", reason="scores are taken of tensors: pip install torch")
    fresh, stored = ((torch.rand(5, 2, 8), torch.rand(5, 2, 12)) for _ in range(2))
    score = HkvdSelector(HkvdOptions(signal=signal)).score(fresh, stored)
    for token in range(5):
        of_keys = sum((a - b) ** 2 for a, b in zip(fresh[0][token].ravel(), stored[0][token].ravel(), strict=True))
        of_values = sum((a - b) ** 2 for a, b in zip(fresh[1][token].ravel(), stored[1][token].ravel(), strict=True))
        expected = of_keys * ("k" in signal) + of_values * ("v" in signal)
        assert score[token].item() == pytest.approx(expected.item(), rel=1e-5)


def test_hkvd_probes_the_layer_of_its_option():
    assert HkvdSelector(HkvdOptions()).probe_layer == 1
    assert HkvdSelector(HkvdOptions(layer=7)).probe_layer == 7
    with pytest.raises(OptionError, match="layer"):
        PluginHost.discover().create("selector", "hkvd", {"layer": 0})


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


@given(moved=moved_spans(), ratio=st.floats(0, 1))
def test_attended_picks_beginnings_where_attention_is_not_measured(moved, ratio):
    picks = AttendedSelector(AttendedOptions()).select(Selection(moved, ratio))
    assert tokens(picks) == tokens(FirstKSelector(FirstKOptions(k=0)).select(Selection(moved, ratio)))


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


def test_first_k_treats_spans_that_touch_each_by_itself():
    picks = FirstKSelector(FirstKOptions(k=4)).select(Selection(TOUCHING, 0.5))
    assert tokens(picks) == [*range(4, 8), *range(10, 17)]
