"""Windows are picked whole and in order; held against twins that go through the tokens one by one."""

from math import ceil

import numpy as np
from blendhub_selectors.signals import heads, moved_mask
from blendhub_selectors.windows import Windows
from hypothesis import given
from hypothesis import strategies as st

from plugins.selectors.tests.prompts import picked_in_turn, ranges, selections, tokens


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


@given(asked=selections(), width=st.sampled_from([1, 2, 4, 7]))
def test_heads_grow_from_the_beginnings_of_spans(asked, width):
    expected = []
    for span in asked.moved:
        for number, start in enumerate(range(span.start, span.end, width)):
            expected.append((number, start, min(start + width, span.end)))
    assert ranges(heads(asked, width)) == [range(start, end) for _, start, end in sorted(expected)]
