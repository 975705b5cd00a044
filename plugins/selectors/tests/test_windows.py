"""Windows are picked whole and in order; held against twins that go through the tokens one by one."""

from dataclasses import replace
from math import ceil

import numpy as np
import pytest
from blendhub_selectors.combined import CombinedSelector
from blendhub_selectors.options import CombinedOptions
from blendhub_selectors.signals import heads, moved_mask
from blendhub_selectors.windows import Windows, side_by_side
from hypothesis import given
from hypothesis import strategies as st

from blendhub import Span
from blendhub.contracts import Selection
from plugins.selectors.tests.prompts import picked_in_turn, ranges, selections, tokens

WIDTHS = st.sampled_from([1, 2, 4, 7])


@st.composite
def some_windows(draw, end):
    windows = [(start, start + draw(st.integers(1, 9))) for start in draw(st.lists(st.integers(0, end - 1)))]
    starts, ends = np.array(windows, np.int64).reshape(-1, 2).T
    return Windows(starts, np.minimum(ends, end))


@given(data=st.data(), asked=selections())
def test_windows_are_taken_whole_until_one_is_too_dear(data, asked):
    windows = data.draw(some_windows(len(asked.tokens)))
    budget = ceil(asked.ratio * len(tokens(asked.moved)))
    picked = windows.within(budget, moved_mask(asked))
    assert tokens(picked) == picked_in_turn(asked.moved, asked.ratio, ranges(windows))


@given(data=st.data(), asked=selections())
def test_a_window_costs_the_moved_tokens_that_no_earlier_one_holds(data, asked):
    windows, seen = data.draw(some_windows(len(asked.tokens))), set()
    for window, cost in zip(ranges(windows), windows.costs(moved_mask(asked)), strict=True):
        assert cost == len(set(window) & set(tokens(asked.moved)) - seen)
        seen |= set(window)


@given(data=st.data(), asked=selections())
def test_parts_side_by_side_have_their_shares_of_every_beginning(data, asked):
    """No part is ahead of another by more than a window, as long as the other has windows left."""
    moved = moved_mask(asked)
    parts = [(share, data.draw(some_windows(len(moved)))) for share in (0.5, 0.25)]
    useful = [ranges(part) for _, part in parts]
    together = ranges(side_by_side([*parts, (0.0, heads(asked, 3))], moved))
    done, seen = [0, 0], [set(), set()]
    lists = [[window for window in useful[n] if adds(window, seen[n], asked)] for n in (0, 1)]
    assert sorted(map(str, together)) == sorted(map(str, lists[0] + lists[1]))
    at, worth = [0, 0], [cost_of(lists[n], asked) for n in (0, 1)]
    for window in together:
        turns = [(done[n] + worth[n][at[n]]) / parts[n][0] if at[n] < len(lists[n]) else float("inf") for n in (0, 1)]
        n = turns.index(min(turns))
        assert window == lists[n][at[n]]
        done[n] += worth[n][at[n]]
        at[n] += 1


def adds(window, seen, asked):
    more = set(window) & set(tokens(asked.moved)) - seen
    seen |= set(window)
    return more


def cost_of(windows, asked):
    seen = set()
    return [len(adds(window, seen, asked)) for window in windows]


@given(asked=selections(), width=WIDTHS, most=st.sampled_from([None, 0, 1, 4, 6]), times=st.sampled_from([1, 2, 3]))
def test_heads_grow_from_the_beginnings_of_spans(asked, width, most, times):
    holes = {hole.end for hole in asked.holes}
    expected = []
    for span in asked.moved:
        n = times if span.start in holes else 1
        end = span.end if most is None else min(span.end, span.start + n * most)
        for number, start in enumerate(range(span.start, end, width)):
            expected.append((number // n, start, min(start + width, end)))
    assert ranges(heads(asked, width, most, times)) == [range(start, end) for _, start, end in sorted(expected)]


SHARES = {
    "both signals": {},
    "beginnings": {"question_share": 0},
    "question": {"head_share": 0},
    "nothing": {"head_share": 0, "question_share": 0},
}


def combined(**options):
    return CombinedSelector(CombinedOptions(**options))


@pytest.mark.parametrize("shares", SHARES.values(), ids=SHARES)
@given(asked=selections(), width=WIDTHS)
def test_combined_picks_whole_windows_within_its_budget(shares, asked, width):
    selector = combined(window_tokens=width, question_tokens=2 * width, **shares)
    order = selector.order(asked, moved_mask(asked))
    assert tokens(selector.select(asked)) == picked_in_turn(asked.moved, asked.ratio, ranges(order))


@pytest.mark.parametrize("shares", SHARES.values(), ids=SHARES)
@given(asked=selections(), ratio=st.floats(0, 1))
def test_a_larger_budget_only_adds(shares, asked, ratio):
    few, many = (
        set(tokens(combined(**shares).select(replace(asked, ratio=one)))) for one in sorted([ratio, asked.ratio])
    )
    assert few <= many


def test_more_of_the_beginning_is_picked_behind_a_hole():
    asked = Selection([Span(0, 100), Span(120, 220)], 0.12, holes=[Span(100, 120)])
    assert combined(question_share=0).select(asked) == [Span(0, 8), Span(120, 136)]
