"""Prompts for the tests of selectors, and the slow twin of how windows are picked."""

from math import ceil

import numpy as np
from hypothesis import strategies as st

from blendhub import Span
from blendhub.contracts import Selection
from blendhub.core.spans import gaps


def tokens(spans):
    return [position for span in spans for position in range(span.start, span.end)]


@st.composite
def moved_spans(draw):
    spans, at = [], 0
    for gap, length in draw(st.lists(st.tuples(st.sampled_from([0, 0, 3]), st.integers(1, 20)), min_size=1)):
        spans.append(Span(at + gap, at + gap + length))
        at = spans[-1].end
    return spans


@st.composite
def selections(draw, words=12):
    """Small prompts of few words, so that much is equal and the question's words are in the text."""
    moved = draw(moved_spans())
    end = moved[-1].end
    question = draw(st.integers(0, 10))
    holes = [gap for gap in gaps(Span(0, end), moved) if draw(st.booleans())]
    random = np.random.default_rng(draw(st.integers(0, 2**16)))
    return Selection(
        moved,
        draw(st.floats(0, 1)),
        holes=holes,
        question=Span(end, end + question),
        # Most words are rare, as in any text.
        tokens=(words * random.random(end + question) ** 2).astype(np.uint32),
    )


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


def ranges(windows):
    return [range(start, end) for start, end in zip(windows.starts.tolist(), windows.ends.tolist(), strict=True)]
