"""The base classes of the contracts: they check arguments once, before a plugin's method sees them, and its results."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendhub import Span
from blendhub.contracts import Matcher, RunKey, Selection, Selector, Store, StoredRun
from blendhub.core.errors import BrokenContract, InvalidInput

MOVED = [Span(10, 20), Span(20, 30), Span(40, 50)]
NO_SPANS = "it should return a list of Span of int, got "
NO_PARTS = "it should pick ascending, disjoint parts of"
NUMPY_INT: Any = np.int64(10)
BAD_PICKS = [
    (None, f"{NO_SPANS}None"),
    ([(10, 20)], f"{NO_SPANS}[(10, 20)]"),
    ([Span(NUMPY_INT, 20)], f"{NO_SPANS}[Span("),
    ((Span(10, 20),), f"{NO_SPANS}(Span("),
    *(([Span(*ends)], NO_PARTS) for ends in ((9, 20), (25, 45), (49, 60), (60, 70), (31, 35), (10, 10))),
    ([Span(40, 50), Span(10, 20)], NO_PARTS),
    ([Span(10, 15), Span(12, 20)], NO_PARTS),
]
"""What a selector may not pick of ``MOVED``, and what is said about it."""

TOKENS = np.arange(20, dtype=np.uint32)
KEY = RunKey("space", "run")


class Picking(Selector):
    """Picks what it is given, and keeps what it was asked."""

    def __init__(self, picks: object) -> None:
        self.picks = picks
        self.asked = []

    def pick(self, selection):
        self.asked.append(selection)
        return self.picks


class Recorder:
    """Keeps the arguments of every call of a plugin's methods."""

    nbytes = 1

    def __init__(self) -> None:
        self.calls = []

    def record(self, *given):
        self.calls.append(given)


class RecordingMatcher(Recorder, Matcher):
    guaranteed_tokens = 1
    insert = remove = find = Recorder.record

    def __len__(self):
        return 0


class RecordingStore(Recorder, Store):
    capacity = corrupted = 1
    write_run = write = read = discard = runs = close = Recorder.record


def test_the_picks_of_a_selector_are_joined_where_they_touch():
    selector = Picking([Span(12, 20), Span(20, 22), Span(22, 30), Span(40, 41)])
    assert selector.select(Selection(MOVED, 0.5)) == [Span(12, 30), Span(40, 41)]


def test_a_selector_sees_arrays_as_long_as_the_prompt():
    selector, tokens = Picking([]), np.arange(70, dtype=np.uint32)
    selector.select(Selection(MOVED, 0.5))
    selector.select(Selection(MOVED, 0.5, holes=[Span(30, 40)], question=Span(55, 60)))
    selector.select(Selection(MOVED, 0.5, tokens=tokens))
    least, asked, whole = selector.asked
    assert (least.moved, least.ratio, least.block_tokens, least.scores) == (MOVED, 0.5, 1, None)
    assert least.tokens.tolist() == [0] * 50
    assert least.tokens.dtype == np.uint32 and len(asked.tokens) == 60
    assert whole.tokens is tokens


def test_picks_that_break_the_contract_are_refused():
    for picks, complaint in BAD_PICKS:
        with pytest.raises(BrokenContract) as raised:
            Picking(picks).select(Selection(MOVED, 0.5))
        assert complaint in str(raised.value)


@given(st.lists(st.integers(0, 60), min_size=2, max_size=8, unique=True), st.sets(st.integers(0, 60)))
def test_picks_pass_if_and_only_if_every_token_of_them_moved(borders, moved):
    """Held against sets of positions."""
    ordered = sorted(borders)
    picks = [Span(start, end) for start, end in zip(ordered[::2], ordered[1::2], strict=False)]
    ascending = [Span(at, at + 1) for at in sorted(moved)]
    picked = {at for span in picks for at in range(span.start, span.end)}
    if picked <= moved:
        chosen = Picking(picks).select(Selection(ascending, 0.5))
        assert {at for span in chosen for at in range(span.start, span.end)} == picked
        assert all(one.end < other.start for one, other in pairwise(chosen))
    else:
        with pytest.raises(BrokenContract):
            Picking(picks).select(Selection(ascending, 0.5))


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
}
BAD_SCORES = [
    None,
    np.zeros(49, np.float32),
    [0.0] * 50,
    np.zeros(50),
    np.zeros(50, np.int64),
    np.zeros((50, 1), np.float32),
    np.float32(1),
]


@pytest.mark.parametrize("key", [*BAD_SELECTIONS, "scores", "attended"])
def test_a_selector_s_method_never_sees_bad_arguments(key):
    selector = Picking([])
    selector.probe_layer = key == "scores"
    selector.attended_layers = (0.5,) if key == "attended" else ()
    # A model's attention may not be measured: only scores must be there.
    for bad in BAD_SELECTIONS.get(key, BAD_SCORES[key == "attended" :]):
        values: dict[str, Any] = {"moved": MOVED, "ratio": 0.5, key: bad}
        with pytest.raises(InvalidInput, match=r"\w+ \w+ \w+"):
            selector.select(Selection(**values))
    assert not selector.asked


def test_scores_that_no_selector_asked_for_are_refused():
    with pytest.raises(InvalidInput, match="does not ask for scores"):
        Picking([]).select(Selection(MOVED, 0.5, scores=np.zeros(50, np.float32)))
    with pytest.raises(InvalidInput, match="does not ask for attended"):
        Picking([]).select(Selection(MOVED, 0.5, attended=np.zeros(50, np.float32)))


def test_a_question_beyond_the_tokens_is_refused():
    with pytest.raises(InvalidInput, match="there are 61 tokens, but spans up to 62"):
        Picking([]).select(Selection(MOVED, 0.5, question=Span(50, 62), tokens=np.zeros(61, np.uint32)))


def test_a_matcher_s_methods_see_arrays_of_tokens():
    matcher = RecordingMatcher()
    matcher.add(1, TOKENS.tobytes(), Span(0, 20))
    matcher.match(bytearray(TOKENS))
    matcher.discard(1, Span(3, 4))
    (run, added, *rest), (matched,), discarded = matcher.calls
    assert (run, rest, discarded) == (1, [Span(0, 20), 0], (1, Span(3, 4)))
    for tokens in (added, matched):
        assert tokens.dtype == np.uint32 and tokens.tolist() == TOKENS.tolist() and not tokens.flags.writeable


def test_a_matcher_s_methods_never_see_bad_arguments():
    matcher = RecordingMatcher()
    numbers: Any = [1, 2]
    calls: list[Callable[..., object]] = [
        lambda: matcher.match(numbers),
        lambda: matcher.add(1, numbers, Span(0, 1)),
        lambda: matcher.add(1, TOKENS, Span(4, 4)),
        lambda: matcher.add(1, TOKENS, Span(4, 21)),
        lambda: matcher.discard(1, Span(4, 4)),
    ]
    for run in (-1, 2**63, True, False, 1.0, "1", None):
        calls.append(lambda run=run: matcher.add(run, TOKENS, Span(0, 1)))
        calls.append(lambda run=run: matcher.discard(run, Span(0, 1)))
    for call in calls:
        with pytest.raises(InvalidInput, match=r"\w+ \w+ \w+"):
            call()
    assert not matcher.calls


def test_a_store_s_methods_see_flat_views():
    store = RecordingStore()
    numbers: Any = np.arange(6, dtype=np.float32).reshape(2, 3)
    store.save(KEY, Span(0, 4), [numbers, b"ab"])
    store.load(KEY, Span(0, 4), [memoryview(numbers)])
    (_, _, saved), (_, _, into) = store.calls
    assert [bytes(view) for view in saved] == [numbers.tobytes(), b"ab"]
    assert all((view.format, view.ndim) == ("B", 1) for view in (*saved, *into))
    into[0][:] = bytes(24)
    assert not numbers.any()


def test_a_store_s_methods_never_see_bad_arguments():
    store, some = RecordingStore(), Span(4, 5)
    gaps = memoryview(bytearray(8))[::2]
    text: Any = "text"
    for call in (
        lambda: store.save_run(StoredRun(KEY, bytes(13), b"", ())),
        lambda: store.save(KEY, Span(4, 4), [b"1"]),
        lambda: store.save(KEY, some, []),
        lambda: store.save(KEY, some, [gaps]),
        lambda: store.save(KEY, some, [text]),
        lambda: store.save_chunks(KEY, [(some, [b"1"])] * 2),
        lambda: store.save_chunks(KEY, [(some, [])]),
        lambda: store.load(KEY, some, [memoryview(b"1")]),
        lambda: store.load(KEY, some, [gaps]),
        lambda: store.load_chunks([(KEY, some, [memoryview(bytearray(1))])] * 2),
        lambda: store.load_chunks([(KEY, some, [memoryview(b"1")])]),
    ):
        with pytest.raises(InvalidInput, match=r"\w+ \w+ \w+"):
            call()
    assert not store.calls
