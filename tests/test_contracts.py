"""A selection is sound, or it cannot be made; and what a selector picks of it is checked before it is computed."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendhub import Span
from blendhub.contracts import Selection, Selector, checked_picks
from blendhub.core.errors import BrokenContract, InvalidInput

MOVED = [Span(10, 20), Span(20, 30), Span(40, 50)]
NUMPY_INT: Any = np.int64(10)
BAD_PICKS = [
    *(None, [(10, 20)], [Span(NUMPY_INT, 20)], (Span(10, 20),)),
    *([Span(10, 10)], [Span(40, 50), Span(10, 20)], [Span(10, 15), Span(12, 20)]),
]
"""What a selector may not pick of ``MOVED``."""


class Picking(Selector):
    """Picks what it is given."""

    def __init__(self, picks: object) -> None:
        self.picks = picks

    def select(self, selection):
        return self.picks


@pytest.mark.parametrize("picks", BAD_PICKS)
def test_picks_that_break_the_contract_are_refused(picks):
    with pytest.raises(BrokenContract, match=r"Picking\.select should (return a list of Span of int|pick ascending)"):
        checked_picks(Picking(picks), Selection(MOVED, 0.5))


@given(st.lists(st.integers(0, 60), min_size=2, max_size=8, unique=True), st.sets(st.integers(0, 60)))
def test_picks_pass_if_and_only_if_every_token_of_them_moved(borders, moved):
    """Held against sets of positions."""
    ordered = sorted(borders)
    picks = [Span(start, end) for start, end in zip(ordered[::2], ordered[1::2], strict=False)]
    selection = Selection([Span(at, at + 1) for at in sorted(moved)], 0.5)
    picked = {at for span in picks for at in range(span.start, span.end)}
    if picked <= moved:
        joined = checked_picks(Picking(picks), selection)
        assert {at for span in joined for at in range(span.start, span.end)} == picked
        assert all(span.end < following.start for span, following in pairwise(joined))
    else:
        with pytest.raises(BrokenContract):
            checked_picks(Picking(picks), selection)


BAD_SCORES = [
    np.zeros(49, np.float32),
    [0.0] * 50,
    np.zeros(50),
    np.zeros(50, np.int64),
    np.zeros((50, 1), np.float32),
    np.float32(1),
]
BAD_SELECTIONS = {
    "moved": [
        [Span(0, 10), Span(9, 20)],
        [Span(0, 10), Span(0, 10)],
        [Span(30, 40), Span(0, 10)],
        [Span(0, 10), Span(12, 12), Span(20, 30)],
        [(0, 10), (20, 30)],
        [Span(0, 10), None],
    ],
    "ratio": [-0.1, -1e-12, 1.0000001, 15, float("nan"), float("inf"), "0.5", None],
    "block_tokens": [0, -1, 1.5, "16", None],
    "holes": [[Span(25, 35)], [Span(30, 35), Span(34, 40)], [Span(30, 30)], [(30, 40)]],
    "question": [Span(0, 5), Span(49, 60), (50, 62), None],
    "tokens": [np.zeros(49, np.uint32), [0] * 50, np.zeros(50, np.int64), np.zeros((50, 1), np.uint32), None],
    "scores": BAD_SCORES,
    "attended": BAD_SCORES,
}


@pytest.mark.parametrize("key", BAD_SELECTIONS)
def test_a_bad_selection_cannot_be_made(key):
    for bad in BAD_SELECTIONS[key]:
        values: dict[str, Any] = {"moved": MOVED, "ratio": 0.5, key: bad}
        with pytest.raises(InvalidInput, match=r"\w+ \w+ \w+"):
            Selection(**values)
            pytest.fail(f"{key} = {bad!r} was taken")
