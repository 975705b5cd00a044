"""The parts of a request that are stored, whenever and however the hub answers."""

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendhub import Match, Span
from blendhub.client.hub_client import Reservation
from blendhub.client.wire import Slot
from blendhub.client.write_rights import WriteRight
from blendhub.core.errors import ArenaFull
from blendhub.core.layout import KVLayout
from blendhub.vllm.scheduler.request_saves import ReservedSlots, spans_to_save

PROMPT, CHUNK = 24, 5
LAYOUT = KVLayout(layers=1, kv_heads=1, key_dim=1, value_dim=1, dtype="float32", chunk_tokens=CHUNK)
RIGHT = WriteRight(lease=1, epoch=1, arena="", end=PROMPT)


def positions(span):
    return set(range(span.start, span.end))


@st.composite
def stored(draw):
    """Disjoint, ascending matches of the prompt."""
    borders = sorted(draw(st.sets(st.integers(0, PROMPT), max_size=8)))
    pairs = zip(borders[::2], borders[1::2], strict=False)
    return [Match(Span(start, end), 1, start, draw(st.booleans())) for start, end in pairs]


def request(matches=(), first=None, blended=None, **others) -> Any:
    usual = {"settled_span": None, "brought": None, "engine_tokens": 0, "prompt_end": PROMPT}
    return SimpleNamespace(**usual | others, matches=matches, first_approximate=first, blended=blended)


def saved(asked, min_tokens=1, stores_blended=True, keeps_windows=False):
    return list(spans_to_save(asked, min_tokens, stores_blended=stores_blended, keeps_windows=keeps_windows))


@given(stored(), st.none() | st.integers(0, PROMPT), st.integers(1, 6))
def test_what_is_not_stored_is_stored(matches, first, min_tokens):
    covered = {p for match in matches if match.exact or first is not None for p in positions(match.span)}
    stretches, stretch = [], []
    for position in range(PROMPT + 1):
        if stretch and (position in covered or position in (first, PROMPT)):
            stretches.append(stretch)
            stretch = []
        if position not in covered:
            stretch.append(position)
    expected = []
    for stretch in stretches:
        exact = first is None or not any(p >= first for p in stretch)
        # The prompt's end is kept however short: what the answer goes on from.
        if exact or len(stretch) >= min_tokens or stretch[-1] == PROMPT - 1:
            expected.append((Span(stretch[0], stretch[-1] + 1), "exact" if exact else "behind"))
    assert saved(request(matches, first), min_tokens) == expected


@pytest.mark.parametrize(
    "settled, expected",
    [
        ([], Span(5, 20)),
        ([Span(0, 9)], Span(9, 20)),
        ([Span(0, 9), Span(12, 20)], Span(9, 12)),
        ([Span(0, 9), Span(12, 15)], Span(9, 20)),
        ([Span(0, 24)], None),
    ],
)
def test_blended_kv_is_stored_from_the_first_token_on_that_is_not_settled(settled, expected):
    asked = request([Match(span, 1, span.start, False, settled=True) for span in settled], 5, Span(5, 20))
    assert [span for span, kind in saved(asked) if kind == "blended"] == ([expected] if expected else [])
    assert not any(kind == "blended" for _, kind in saved(asked, stores_blended=False))


def test_what_vllm_keeps_a_window_of_is_not_stored():
    asked = request(engine_tokens=10)
    assert saved(asked) == [(Span(0, PROMPT), "exact")]
    assert saved(asked, keeps_windows=True) == [(Span(10, PROMPT), "exact")]


@given(st.integers(0, PROMPT), st.lists(st.integers(0, 9), max_size=9), st.integers(0, 9), st.booleans())
def test_each_slot_is_written_once_in_order_and_when_all_of_it_is_computed(start, steps, answered, preempted):
    future: Future[Reservation] = Future()
    reserved, slots = ReservedSlots(future), LAYOUT.chunks_of(Span(start, PROMPT))
    computed, written = 0, []
    for number, step in enumerate([*steps, PROMPT]):
        if number == answered:
            future.set_result(Reservation(Span(start, PROMPT), 1, RIGHT, tuple(Slot(one, 64) for one in slots)))
        computed = step if preempted and number == 2 else min(computed + step, PROMPT)
        taken = [slot.span for _, slot in reserved.take_complete(computed)]
        assert all(span.end <= computed for span in taken)
        assert not taken or future.done()
        written += taken
    if future.done():
        assert written == slots and reserved.is_done and reserved.unused_right is None
    else:
        assert not written and reserved.is_pending


@pytest.mark.parametrize("how", ["fails", "is cancelled", "is empty"])
def test_without_slots_nothing_is_written_and_nothing_is_left_to_end(how):
    future: Future[Reservation] = Future()
    if how == "fails":
        future.set_exception(ArenaFull("no slot is free"))
    elif how == "is cancelled":
        future.cancel()
    else:
        future.set_result(Reservation(Span(PROMPT, PROMPT), None, None, ()))
    reserved = ReservedSlots(future)
    assert reserved.is_done and reserved.unused_right is None and not list(reserved.take_complete(PROMPT))


def test_what_is_dropped_is_written_no_more_and_its_right_is_left_to_end():
    future: Future[Reservation] = Future()
    reserved = ReservedSlots(future)
    slots = tuple(Slot(one, 64) for one in LAYOUT.chunks_of(Span(0, PROMPT)))
    future.set_result(Reservation(Span(0, PROMPT), 1, RIGHT, slots))
    assert len(list(reserved.take_complete(2 * CHUNK))) == 2
    reserved.drop()
    assert not list(reserved.take_complete(PROMPT))
    assert reserved.is_done and reserved.unused_right == RIGHT
