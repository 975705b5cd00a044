"""The state of a request under every order of events that vLLM can produce."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.v1.request import Request

from blendhub import Match, Span
from blendhub.client.wire import Found
from blendhub.core.layout import Variant
from blendhub.outcome.reasons import Why
from blendhub.vllm.decision import Choice, Decision, Refusal
from blendhub.vllm.messages import LoadResult
from blendhub.vllm.scheduler.admission import Terms
from blendhub.vllm.scheduler.request_state import RequestState, Stage
from tests.stand_in import Anything

EVENTS = {
    "look_up": set(Stage) - {Stage.LOADING},
    "answered": {Stage.LOOKING_UP},
    "decided": {Stage.FOUND},
    "begin_load": {Stage.FOUND},
    "end_load": {Stage.LOADING},
    "fail_load": {Stage.LOADING},
    "refuse": set(Stage) - {Stage.LOADING},
}
"""The stages in which each event may come."""


class CountedLookup(Anything):
    """Stands in for a lookup: here only its end matters."""

    def __init__(self) -> None:
        self.closes = 0

    def close(self) -> None:
        self.closes += 1


def new_state() -> RequestState:
    return RequestState(
        Request("r", [1] * 40, SamplingParams(max_tokens=1), None), Terms(Variant(), "blend", 0.15, True)
    )


def decision(moved_from: int | None) -> Decision:
    start = 0 if moved_from is None else moved_from
    return Decision(0, 30, (Match(Span(start, 30), 1, start + 5, moved_from is None),), 0.15)


def apply(state: RequestState, event: str, moved_from: int | None) -> None:
    if event == "look_up":
        state.look_up()
        state.lookup = CountedLookup()
    elif event == "answered":
        state.answered(Found(matches=()))
    elif event == "decided":
        state.decided(Choice(decision(moved_from)))
    elif event == "begin_load":
        state.begin_load().close()
    elif event == "end_load":
        state.end_load(LoadResult())
    elif event == "fail_load":
        state.end_load(LoadResult(error="the hub is gone"))
    else:
        state.refuse(Refusal(Why.OFF, "mode is off"))


events = st.lists(st.tuples(st.sampled_from(sorted(EVENTS)), st.none() | st.integers(1, 29)), max_size=40)


@given(events)
def test_every_lookup_is_closed_once_and_blended_blocks_are_never_forgotten(steps):
    state, lookups = new_state(), list[Any]()
    blended: list[int] = []
    for event, moved_from in steps:
        if state.stage not in EVENTS[event] or (event == "begin_load" and state.decision is None):
            continue
        before = state.first_approximate
        apply(state, event, moved_from)
        if event == "look_up":
            lookups.append(state.lookup)
        if event == "end_load" and state.decision.first_approximate is not None:
            blended.append(state.decision.first_approximate)
        loading = [state.decision.first_approximate] if state.stage is Stage.LOADING else []
        known = [*blended, *(first for first in loading if first is not None)]
        assert state.first_approximate == min(known, default=None)
        if event not in ("begin_load", "fail_load"):
            assert state.first_approximate == before
        assert (state.lookup is not None) == (state.stage in (Stage.LOOKING_UP, Stage.FOUND))
        assert [lookup.closes for lookup in lookups] == [int(lookup is not state.lookup) for lookup in lookups]
    state.end_lookup()
    assert all(lookup.closes == 1 for lookup in lookups)
