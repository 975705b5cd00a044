"""The parts of a request that are stored, whenever and however the hub answers."""

from concurrent.futures import Future

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendhub import Match, Span
from blendhub.client.hub_client import Reservation
from blendhub.client.wire import Slot
from blendhub.client.write_rights import WriteRight
from blendhub.core.errors import ArenaFull
from blendhub.core.layout import KVLayout
from blendhub.vllm.scheduler.save_plan import PlannedSave, SavePlan

PROMPT = 24
CHUNK = 5
LAYOUT = KVLayout(layers=1, kv_heads=1, key_dim=1, value_dim=1, dtype="float32", chunk_tokens=CHUNK)


def positions(span):
    return set(range(span.start, span.end))


class Hub:
    """Keeps what it was asked for, until a test answers."""

    def __init__(self):
        self.asked = []

    def reserve(self, span, kind, run):
        future = Future()
        self.asked.append((span, kind, run, future))
        return future

    def answer(self, number, kind, skipped, kept):
        """Grant a save of what was asked for: its beginning is stored already, its end finds no room."""
        span, _, run, future = self.asked[number]
        granted = Span(span.start + min(skipped, len(span)), span.end)
        granted = Span(granted.start, granted.start + min(kept, len(granted)))
        if kind == "fails":
            future.set_exception(ArenaFull("no slot is free"))
        elif kind == "is cancelled":
            future.cancel()
        elif kind == "is empty" or not len(granted):
            future.set_result(Reservation(Span(span.end, span.end), None, None, ()))
        else:
            slots = tuple(Slot(chunk, 100 * chunk.start) for chunk in LAYOUT.chunks_of(granted))
            future.set_result(Reservation(granted, run or number, right_to(number, granted.end), slots))


def right_to(lease, end):
    return WriteRight(lease=lease, epoch=1, arena="", end=end)


answers = st.tuples(
    st.sampled_from(["grants", "grants", "grants", "fails", "is cancelled", "is empty"]),
    st.sampled_from([0, 0, 0, 1, CHUNK, 2 * CHUNK]),
    st.sampled_from([PROMPT, PROMPT, 3, CHUNK]),
)


@st.composite
def stored(draw):
    """Disjoint, ascending matches of the prompt."""
    borders = sorted(draw(st.sets(st.integers(0, PROMPT), max_size=8)))
    pairs = zip(borders[::2], borders[1::2], strict=False)
    return [Match(Span(start, end), 1, start, draw(st.booleans())) for start, end in pairs]


@given(stored(), st.none() | st.integers(0, PROMPT), st.integers(1, 6))
def test_what_is_not_stored_is_asked_for(matches, first_approximate, min_tokens):
    hub = Hub()
    SavePlan(hub.reserve, min_tokens).begin(PROMPT, [match.span for match in matches], first_approximate)
    covered = {p for match in matches for p in positions(match.span)}
    stretches, stretch = [], []
    for position in range(PROMPT + 1):
        if stretch and (position in covered or position in (first_approximate, PROMPT)):
            stretches.append(stretch)
            stretch = []
        if position not in covered:
            stretch.append(position)
    expected = []
    for stretch in stretches:
        exact = first_approximate is None or not any(p >= first_approximate for p in stretch)
        kind = "exact" if exact else "behind"
        # The prompt's end is kept however short: what the answer goes on from.
        if exact or len(stretch) >= min_tokens or stretch[-1] == PROMPT - 1:
            expected.append((Span(stretch[0], stretch[-1] + 1), kind, None))
    assert [asked[:3] for asked in hub.asked] == expected


@given(stored(), st.integers(0, 12), st.data())
def test_every_granted_position_is_written_once_in_order_and_never_too_early(matches, answered, data):
    hub = Hub()
    saving = SavePlan(hub.reserve, 1)
    saving.begin(PROMPT, [match.span for match in matches], None)
    written = {}

    def write(computed):
        for save in saving.saves:
            taken = save.next_part(computed)
            if taken is None:
                continue
            right, slots, span = taken
            assert save.reservation and right == save.reservation.right
            assert len(span) and span.end <= computed
            assert slots == tuple(s for s in save.reservation.slots if positions(s.span) & positions(span))
            written.setdefault(right, []).extend(range(span.start, span.end))

    def answer_some():
        waiting = [n for n, (*_, future) in enumerate(hub.asked) if not future.done()]
        for number in data.draw(st.lists(st.sampled_from(waiting), unique=True) if waiting else st.just([])):
            hub.answer(number, *data.draw(answers))

    steps = sorted(data.draw(st.lists(st.integers(0, PROMPT), max_size=5)))
    for computed in [*steps, PROMPT]:
        answer_some()
        write(computed)
    total = PROMPT + answered
    saving.add_answer(PROMPT, total, exact=True)
    answer_some()
    write(total)
    for number, (*_, future) in enumerate(hub.asked):
        if not future.done():
            assert saving.is_pending
            hub.answer(number, *data.draw(answers))
    assert not saving.is_pending
    write(total)
    granted = {save.reservation.right: save.reservation.span for save in saving.saves if save.reservation}
    granted.pop(None, None)
    assert written == {right: list(range(span.start, span.end)) for right, span in granted.items()}
    assert saving.open_rights == []


@given(st.integers(1, PROMPT), st.integers(0, PROMPT))
def test_a_lease_that_is_not_written_to_its_end_is_open(length, computed):
    future = Future()
    save = PlannedSave(Span(0, length), future)
    assert save.is_pending and save.open_right is None
    slots = tuple(Slot(chunk, 0) for chunk in LAYOUT.chunks_of(Span(0, length)))
    right = right_to(7, length)
    future.set_result(Reservation(Span(0, length), 1, right, slots))
    save.next_part(computed)
    assert save.open_right == (right if computed < length else None)


def test_a_preempted_request_does_not_write_again_what_it_computes_again():
    hub = Hub()
    saving = SavePlan(hub.reserve, 1)
    saving.begin(PROMPT, [], None)
    hub.answer(0, "grants", 0, PROMPT)
    (save,) = saving.saves
    assert save.next_part(10)[2] == Span(0, 10)
    assert save.next_part(4) is None
    assert save.next_part(12)[2] == Span(10, 12)


def test_an_answer_goes_on_with_the_run_that_holds_the_end_of_the_prompt():
    hub = Hub()
    saving = SavePlan(hub.reserve, 1)
    saving.begin(PROMPT, [Span(0, 10)], None)
    hub.answer(0, "grants", 0, PROMPT)
    saving.add_answer(PROMPT, PROMPT + 3, exact=True)
    assert hub.asked[-1][:3] == (Span(PROMPT, PROMPT + 3), "exact", saving.saves[0].reservation.run)


def test_an_answer_begins_a_run_of_its_own_where_the_end_of_the_prompt_found_no_room():
    hub = Hub()
    saving = SavePlan(hub.reserve, 1)
    saving.begin(PROMPT, [], None)
    hub.answer(0, "grants", 0, 10)
    saving.add_answer(PROMPT, PROMPT + 3, exact=False)
    assert hub.asked[-1][:3] == (Span(PROMPT, PROMPT + 3), "behind", None)


@pytest.mark.parametrize(
    "settled, asked",
    [
        ([], [Span(5, 20)]),
        ([Span(0, 9)], [Span(9, 20)]),
        ([Span(0, 9), Span(12, 20)], [Span(9, 12)]),
        ([Span(0, 9), Span(12, 15)], [Span(9, 20)]),
        ([Span(0, 24)], []),
    ],
)
def test_blended_text_is_stored_in_one_piece_unless_it_is_settled(settled, asked):
    hub = Hub()
    SavePlan(hub.reserve, 1).blend(Span(5, 20), settled)
    assert [one[:3] for one in hub.asked] == [(span, "blended", None) for span in asked]
