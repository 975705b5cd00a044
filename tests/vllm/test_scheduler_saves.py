"""What the scheduler side stores of each request, and when; ``test_scheduler_histories`` has what is exact of it."""

import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.sched.output import SchedulerOutput

from blendhub import Span
from blendhub.core.layout import KVLayout
from blendhub.core.provenance import Provenance
from blendhub.outcome.reasons import NotReused, Why
from blendhub.vllm.messages import LoadResult, SaveJob, WorkerReport
from blendhub.vllm.scheduler import saves
from blendhub.vllm.scheduler.blocks.block_tables import BlockTables, Window
from blendhub.vllm.scheduler.saves import spans_to_save
from tests.spans import matches_of, positions
from tests.stand_in import StandIn
from tests.vllm.played_engine import BLOCK, LAYOUT, NAMESPACE, TEXT, played_engine, text

PROMPT = 100


@given(matches_of(PROMPT), st.none() | st.integers(0, PROMPT), st.integers(1, 20), st.booleans())
def test_what_is_not_stored_is_stored(matches, first, min_tokens, donates):
    """The hub may have only a stranger's copy of what a trusted request finds exactly."""
    kept = [match for match in matches if (not donates if match.exact else first is not None)]
    covered = {position for match in kept for position in positions([match.span])}
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
            expected.append((Span(stretch[0], stretch[-1] + 1), "exact" if exact else "after_blended"))
    behind = Provenance("exact" if first is None else "after_blended")
    kv = StandIn(first_approximate=first, blended=None, not_computed=[], of_computed=lambda donates_from: behind)
    request: Any = StandIn(
        kv=kv, prompt_end=PROMPT, terms=StandIn(donates=donates, donates_from=0), reuse=StandIn(matches=matches)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saves, "MIN_SAVED_TOKENS", min_tokens)
        saved = spans_to_save(request, stores_blended=True, keeps_windows=False)
        assert [(span, provenance.kind) for span, provenance in saved] == expected


# Through the scheduler side and a real hub.


def test_of_a_prompt_with_images_the_text_before_the_first_is_stored_and_found(engine):
    """An image's tokens are placeholders, so neither they nor what stands behind them follow from token ids."""
    images = [
        MultiModalFeatureSpec(data=None, modality="image", identifier=name, mm_position=PlaceholderRange(at, 40))
        for name, at in (("second", 200), ("first", 110))
    ]
    before, behind = text(0, 110), [7] * 40 + text(1, 50) + [7] * 40 + text(2, 30)
    engine.serve("a", before + behind, media=images, audit=True)
    assert engine.found(before + behind, exact=True) == set(range(110))
    # In another place, before another image, and in a prompt without images.
    engine.serve("b", text(3, 40) + before[:96] + behind, media=images[:1], audit=True)
    assert (engine.last_report["moved_tokens"], engine.last_report.get("audit")) == (96, None)
    assert engine.serve("c", before + text(4, 64)) == 110
    # What stands behind the image was not stored: not even text that is the same.
    assert engine.serve("d", text(1, 50) + text(2, 30) + text(5, 16)) == 0


def test_blocks_are_kept_until_a_late_reservation_is_used(engine, monkeypatch):
    request = engine.arrived("a", text(0, 64))
    engine.load(request)
    engine.step(a=(0, 64))
    request.append_output_token_ids(text(3, 33))
    save = engine.side.saves._plan_saves

    def save_just_before_the_hub_answers(*arguments):
        save(*arguments)
        engine.settle()

    monkeypatch.setattr(engine.side.saves, "_plan_saves", save_just_before_the_hub_answers)
    engine.end(request, 96)
    assert engine.found(text(0, 64) + text(3, 33), exact=True) == set(range(96))


def test_the_map_of_a_segment_is_written_once_although_the_request_is_repaired_meanwhile():
    """A worker keeps a map until it is written, and not until the hub has it: it lacks it for the second writing."""
    with played_engine(namespace=replace(NAMESPACE, state_layouts=(LAYOUT,), moves_states=True)) as engine:
        request = engine.arrived("a", text(0, 96))
        engine.load(request)
        served = engine.side.requests.known["a"]
        served.reuse.result = LoadResult(segments=((Span(32, 80), 24),))

        def planned(before: int, n_scheduled: int) -> list[SaveJob]:
            request.num_computed_tokens, step = before, SchedulerOutput.make_empty()
            step.num_scheduled_tokens["a"] = step.total_num_scheduled_tokens = n_scheduled
            saves = engine.side.plan(step).saves
            engine.settle()
            return saves

        written = planned(0, 96) + planned(96, 1)  # the hub may answer within the first step
        engine.side.saves.repaired(served)  # the hub has nothing of this yet
        engine.settle()
        again = planned(96, 1)
        assert [sum(job.map_bytes for job in saves) for saves in (written, again)] == [24, 0] and again


def test_the_end_of_a_request_is_in_one_plan_only(engine):
    """With two batches in flight there is a plan between the one that says it and the answer to that."""
    request = engine.arrived("a", text(0, 64))
    engine.load(request)
    engine.step(a=(0, 64))
    request.append_output_token_ids(1)
    request.num_computed_tokens = 64
    assert engine.side.ended(request, ([1, 2, 3, 4],))[0]
    announced = []
    for _ in range(5):
        engine.step()
        announced.append(len(engine.ending))
    assert sorted(announced) == [0, 0, 0, 0, 1] and engine.side.has_work
    engine.side.process_report(WorkerReport(committed_ranks={"a": 1}))
    assert not engine.side.has_work


@pytest.fixture
def windowed():
    """An engine whose second block table is of layers with a window of 64 tokens."""
    with played_engine(tables=BlockTables((BLOCK, BLOCK), (None, Window(64)))) as engine:
        engine.blocks.of = lambda request: tables
        tables = [list(range(1, 101)), list(range(1, 101))]
        yield engine, tables


def begin(engine, n_tokens, n_cached=0):
    """A request of which vLLM has cached so many tokens. It waits until its first step can be stored: its blocks may
    be gone in the second."""
    request = engine.arrived("a", text(0, n_tokens))
    while engine.turn(request, n_cached) == (None, False):
        engine.settle()
    engine.side.allocated(request, ([], []), 0)
    return request


def test_what_the_hub_reserved_too_late_for_blocks_that_vllm_has_freed_is_given_up(engine):
    engine.blocks.blocks = [0, 0, 3, 4, 5, 6]
    request = engine.arrived("a", text(0, 96))
    engine.load(request)
    engine.step(a=(0, 64))
    assert not engine.step(a=(64, 16)) and not engine.step(a=(80, 16)), "a commit vouches for what was given up"
    engine.end(request, 96)
    assert engine.found(text(0, 96), exact=True) == set() and not engine.leases()
    assert engine.counters["reservations_failed_DeadlineExceeded"] == 1


@pytest.mark.parametrize("n_cached", [96, 0], ids=["vLLM's cache", "another connector"])
def test_what_has_a_window_of_the_prompt_alone_is_not_stored(windowed, n_cached):
    engine, tables = windowed
    tables[1][:5] = [0] * 5
    request = begin(engine, 160, n_cached)
    if not n_cached:
        request.num_computed_tokens = 96  # the other connector loads
        assert not engine.step()
    assert [job.slot.span for job in engine.step(a=(96, 64))] == [Span(96, 128), Span(128, 160)]
    assert engine.side.requests.known["a"].first_approximate is None, "it is stored, and found, as exact"
    assert not any("failed" in name for name in engine.counters)
    served = engine.side.requests.known["a"]
    assert served.first_approximate is None, "nothing of it is approximate, and nothing has to be repaired"
    assert served.kv.of_computed(0).is_exact


def calls_of_a_decode_step(engine, n_running):
    """How many Python functions a step calls in which so many requests decode whose prompts are stored."""
    running = {f"{n_running}-{number}": TEXT[number * 48 : number * 48 + 32] for number in range(n_running)}
    for name, prompt in running.items():
        engine.load(engine.arrived(name, prompt))
    engine.step(**dict.fromkeys(running, (0, 32)))
    for name in running:
        engine.side.requests.known[name].request.append_output_token_ids(1)
    engine.step(**dict.fromkeys(running, (32, 1)))
    output = SchedulerOutput.make_empty()
    output.num_scheduled_tokens = dict.fromkeys(running, 1)
    calls = []
    sys.setprofile(lambda frame, event, argument: calls.append(event) if event == "call" else None)
    try:
        engine.side.plan(output)
    finally:
        sys.setprofile(None)
    return len(calls)


def test_a_step_looks_at_no_running_request_whose_prompt_is_stored(engine):
    few, many = calls_of_a_decode_step(engine, 4), calls_of_a_decode_step(engine, 1024)
    assert many <= few + 2, f"{many} calls with 1,024 running requests, {few} with 4"


STATE_ROWS = KVLayout(layers=1, kv_heads=1, key_dim=99, value_dim=0, dtype="int8", chunk_tokens=8)


@pytest.fixture
def recurrent():
    """An engine whose second block table is of recurrent layers, and whose cache has no state any more."""
    tables, space = BlockTables((BLOCK, 64), (None, None), (1,)), replace(NAMESPACE, state_layouts=(STATE_ROWS,))
    with played_engine(tables=tables, namespace=space, blends=False) as engine:
        engine.blocks.of = lambda request: (list(range(1, 101)), [0] * 20)
        engine.blocks.states = lambda request, end: {}
        yield engine


def test_where_vllm_has_a_state_no_more_its_chunk_is_stored_without(recurrent):
    engine, prompt, asked = recurrent, text(0, 150), []
    ask = engine.side.saves._client.reserve
    engine.side.saves._client.reserve = lambda *given: (asked.append(given[3]), ask(*given))[1]
    request = engine.arrived("a", prompt)
    assert engine.load(request) == 0
    engine.step(a=(0, 128))
    engine.step(a=(128, 22))
    request.append_output_token_ids(text(9, 60))
    engine.end(request, 209)
    assert sum(provenance.has_state for provenance in asked) == 1, "no slot is reserved for what is gone already"
    assert not any(job.has_state for job in engine.saved)
    found = engine.client.lookup(np.asarray(text(0, 150) + text(9, 59), np.uint32), acquire=False).result()
    assert not found.matches and found.staying == (NotReused(Span(0, 209), Why.NO_STATE),), "all KV is there"
    assert not any("failed" in name for name in engine.counters) and not engine.leases()
    request = engine.arrived("b", text(0, 150))
    assert engine.load(request) == 0
    assert engine.report("b")["reason"].startswith("149 tokens are not reused: it is stored, and behind it no")


def test_where_states_may_be_gone_in_the_next_step_a_request_waits_for_the_workers_sessions(recurrent, engine):
    for played, waits in ((recurrent, True), (engine, False)):
        played.arrived("a", text(0, 150))
        request = played.side.requests.known["a"]
        assert played.side.saves.prepare(request, True, 0.0) is not waits
        assert played.side.saves.prepare(request, False, 0.0)
