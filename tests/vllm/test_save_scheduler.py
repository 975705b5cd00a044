"""What the scheduler side stores of each request."""

import sys

import numpy as np
import pytest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.sched.output import SchedulerOutput

from blendhub import Span
from blendhub.vllm.messages import WorkerReport
from blendhub.vllm.scheduler.blocks.block_tables import BlockTables, Window
from tests.vllm.played_engine import BLOCK, TEXT, played_engine, text


def test_blended_text_is_never_stored_as_exact(engine):
    engine.serve("a", text(0, 96))
    prompt = text(1, 64) + text(0, 96) + text(2, 64)
    engine.serve("b", prompt)
    # Before the first moved token all is as the model alone computes it.
    assert engine.found(prompt, exact=True) == set(range(64))
    assert set(range(160, 224)) <= engine.found(prompt, exact=False)
    assert (engine.gauge("read_leases"), engine.gauge("write_leases")) == (0, 0)


def test_of_a_prompt_with_images_the_text_before_the_first_is_stored_and_found(engine):
    """An image's tokens are placeholders, so neither they nor what stands behind them follow from token ids."""
    images = [
        MultiModalFeatureSpec(data=None, modality="image", identifier=name, mm_position=PlaceholderRange(at, 40))
        for name, at in (("second", 200), ("first", 110))
    ]
    before, behind = text(0, 110), [7] * 40 + text(1, 50) + [7] * 40 + text(2, 30)
    engine.serve("a", before + behind, media=images, audit=True)
    assert engine.found(before + behind, exact=True) == set(range(110))
    assert engine.last_report["exact_tokens"] == 0
    # In another place, before another image, and in a prompt without images.
    engine.serve("b", text(3, 40) + before[:96] + behind, media=images[:1], audit=True)
    assert (engine.last_report["moved_tokens"], engine.last_report.get("audit")) == (96, None)
    assert engine.serve("c", before + text(4, 64)) == 110
    # What stands behind the image was not stored: not even text that is the same.
    assert engine.serve("d", text(1, 50) + text(2, 30) + text(5, 16)) == 0


def test_only_the_computed_part_of_an_aborted_request_is_stored(engine):
    prompt = text(0, 200)
    request = engine.arrived("a", prompt)
    engine.load(request)
    engine.step(a=(0, 64))
    engine.end(request, 64)
    assert all(job.slot.span.end <= 64 for job in engine.saved)
    assert engine.found(prompt, exact=True) == set(range(64))
    assert engine.gauge("write_leases") == 0


def test_a_preempted_request_that_comes_back_blended_stores_nothing_more_as_exact(engine):
    beginning, document = text(0, 64), text(1, 96)
    engine.serve("beginning", beginning)
    prompt = beginning + document + text(2, 64)
    request = engine.arrived("a", prompt)
    assert engine.load(request) == 64
    engine.step(a=(64, 16))
    engine.step(a=(80, 16))
    # It is preempted, and before its next turn another request brings its text to the hub.
    engine.serve("document", text(3, 32) + document)
    assert engine.load(request) == 160
    engine.step(a=(160, 64))
    engine.end(request, 224)
    assert engine.found(prompt, exact=True) <= set(range(96))


def test_a_failed_load_does_not_make_earlier_blended_text_exact(engine):
    document, answer = text(1, 96), text(3, 33)
    engine.serve("document", document)
    prompt = text(0, 64) + document + text(2, 64)
    request = engine.arrived("a", prompt)
    assert engine.load(request) == 160
    engine.step(a=(160, 64))
    # It is preempted and comes back: vLLM's cache still has its first blended blocks, the rest fails to load.
    engine.load(request, local=96, error="the hub is gone")
    engine.step(a=(96, 128))
    for token in answer:
        request.append_output_token_ids(token)
    engine.end(request, 224 + 32)
    assert not engine.found(prompt + answer, exact=True) & set(range(64, 256))


def test_blocks_are_kept_until_a_late_reservation_is_used(engine, monkeypatch):
    prompt, answer = text(0, 64), text(3, 33)
    request = engine.arrived("a", prompt)
    engine.load(request)
    engine.step(a=(0, 64))
    for token in answer:
        request.append_output_token_ids(token)
    save = engine.side.saves._add_jobs

    def save_just_before_the_hub_answers(*arguments):
        save(*arguments)
        engine.settle()

    monkeypatch.setattr(engine.side.saves, "_add_jobs", save_just_before_the_hub_answers)
    engine.end(request, 96)
    assert engine.found(prompt + answer, exact=True) == set(range(96))


def test_an_answer_continues_the_run_of_its_prompt_and_begins_one_behind_a_prompt_that_is_stored(engine):
    prompt, runs = text(0, 64), []
    for name, answer in (("first", text(3, 33)), ("second", text(4, 33))):
        request = engine.request(name, prompt)
        engine.side.arrived(request)
        there = engine.load(request)
        engine.step(**{name: (there, 64 - there)})
        engine.step(**{name: (64, 1)})  # the prompt is written, and committed
        for token in answer:
            request.append_output_token_ids(token)
        engine.end(request, 96)
        matches = engine.client.lookup(np.asarray(prompt + answer[:32], np.uint32), acquire=False).result().matches
        assert matches[-1].span.end == 96
        runs.append({match.run for match in matches})
    assert len(runs[0]) == 1 and len(runs[1]) == 2


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
        announced.append(engine.ending)
    assert sorted(map(len, announced)) == [0, 0, 0, 0, 1]
    assert engine.side.has_work
    engine.side.process_report(WorkerReport(committed_ranks={"a": 1}))
    assert not engine.side.has_work


def test_blocks_that_vllm_has_freed_are_not_stored(engine):
    """Attention with a window: vLLM has block 0 in the place of those that the window has left."""
    engine.blocks.blocks = [0, 0, 3, 4]
    prompt = text(0, 64)
    request = engine.arrived("a", prompt)
    engine.load(request)
    engine.step(a=(0, 64))
    assert not engine.step(a=(64, 1))
    engine.end(request, 64)
    assert engine.found(prompt, exact=True) == set()
    assert engine.gauge("write_leases") == 0
    assert engine.counters["reservations_failed_DeadlineExceeded"] == 1


def test_each_salt_reuses_its_own_text_over_one_session(engine):
    document, salts = text(0, 64), (None, "ann", "bob")
    for salt in salts:
        assert engine.serve(f"first {salt}", document, salt) == 0
        assert engine.serve(f"again {salt}", document, salt) == 63
    assert engine.gauge("sessions") == 2, "one of the scheduler and one of the worker"
    assert engine.side.clear()
    engine.settle()
    for salt in salts:
        assert engine.serve(f"after the clear {salt}", document, salt) == 0


@pytest.fixture
def windowed():
    """An engine whose second block table is of layers with a window of 64 tokens."""
    with played_engine(tables=BlockTables((BLOCK, BLOCK), (None, Window(64)))) as engine:
        engine.blocks.of = lambda request: tables
        tables = [list(range(1, 101)), list(range(1, 101))]
        yield engine, tables


def test_with_windows_a_request_is_scheduled_when_its_first_step_can_be_stored(windowed):
    """Its blocks may be gone in the second step."""
    engine, _ = windowed
    prompt = text(0, 96)
    request = engine.arrived("a", prompt)
    while engine.turn(request, 0) == (None, False):
        engine.settle()
    engine.side.allocated(request, ([], []), 0)
    assert sum(len(job.slot.span) for job in engine.step(a=(0, 96))) == 96


def test_an_answer_is_stored_before_its_blocks_have_left_the_window(windowed):
    engine, tables = windowed
    prompt, answer = text(0, 64), text(3, 160)
    request = engine.arrived("a", prompt)
    while engine.turn(request, 0) == (None, False):
        engine.settle()
    engine.side.allocated(request, ([], []), 0)
    engine.step(a=(0, 64))
    for number, token in enumerate(answer):
        request.append_output_token_ids(token)
        gone = max(0, 64 + number - 63) // BLOCK
        tables[1][:gone] = [0] * gone
        engine.step(a=(64 + number, 1))
    request.num_computed_tokens = 64 + len(answer) - 1
    assert engine.side.ended(request, tables)[0]
    while "a" not in engine.ending:
        engine.step()
    assert engine.found(prompt + answer, exact=True) == set(range(64 + len(answer) - 1))


def test_a_request_that_ends_before_it_is_scheduled_leaves_no_right(windowed):
    engine, _ = windowed
    request = engine.arrived("a", text(0, 96))
    engine.turn(request, 0)
    assert engine.side.ended(request, ([], []))[0] is False
    engine.settle()
    assert engine.gauge("write_leases") == 0


def behind_a_window(windowed, n_cached):
    """A request of which one group of layers has lost the first blocks, and vLLM has cached so many tokens."""
    engine, tables = windowed
    tables[1][:5] = [0] * 5
    request = engine.arrived("a", text(0, 160))
    while engine.turn(request, n_cached) == (None, False):
        engine.settle()
    engine.side.allocated(request, ([], []), 0)
    return engine, request


def test_what_vllm_has_cached_is_not_stored_where_it_keeps_a_window_of_it(windowed):
    engine, _ = behind_a_window(windowed, 96)
    assert next(job.slot.span for job in engine.step(a=(96, 64))).start == 96


def test_what_another_connector_has_loaded_is_not_stored_where_it_loads_a_window_of_it(windowed):
    engine, request = behind_a_window(windowed, 0)
    request.num_computed_tokens = 96  # the other connector loads
    assert not engine.step()
    assert [job.slot.span for job in engine.step(a=(96, 64))] == [Span(96, 128), Span(128, 160)]
    assert not any("failed" in name for name in engine.counters)


def calls_of_a_decode_step(engine, n_running):
    """How many Python functions a step calls in which so many requests decode whose prompts are stored."""
    running = {f"{n_running}-{number}": TEXT[number * 48 : number * 48 + 32] for number in range(n_running)}
    for name, prompt in running.items():
        request = engine.arrived(name, prompt)
        engine.load(request)
        engine.side._requests[name].request.num_computed_tokens = 0
    engine.step(**dict.fromkeys(running, (0, 32)))
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
