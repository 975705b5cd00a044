"""What the scheduler side has repaired, in which order and for how long: on a real hub, with a played worker."""

import time
from itertools import count
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blendhub.core.spans import Span
from blendhub.outcome.report import AuditOutcome
from blendhub.vllm.costs import Cost, Costs
from blendhub.vllm.messages import RepairResult, WorkerReport
from blendhub.vllm.scheduler import repair_pace, repairs
from blendhub.vllm.scheduler.repair_pace import MIN_TOKENS, ON_ACCELERATORS, ON_CPUS, SAVED_UP_FORWARDS, RepairPace
from blendhub.vllm.scheduler.request.terms import is_plain
from blendhub.vllm.watching.stats import AuditRecord
from tests.vllm.played_engine import NAMESPACE, SETTINGS, played_engine, text

FAST = Costs(
    prefill=Cost(1e-9), probe=Cost(1e-9), recompute=Cost(1e-9), load=Cost(1e-9), engine_tokens=4096, token_bytes=1000.0
)
"""Of a repair that costs nothing."""
ALWAYS = msgspec.structs.replace(SETTINGS, repair="always")
PROMPT = text(1, 32) + text(0, 96) + text(2, 21)
FIRST = 32
"""The first approximate token."""


@pytest.fixture
def at_once(monkeypatch):
    """A step repairs as much as is left, and if nothing is computed, the second one."""
    monkeypatch.setattr(repair_pace, "MIN_TOKENS", 4096)
    monkeypatch.setattr(repair_pace, "ON_CPUS", ON_CPUS._replace(idle_s=0.0))


@pytest.fixture
def engine(at_once):
    with played_engine(settings=ALWAYS, costs=FAST, audits=True) as engine:
        engine.serve("stored", text(0, 96))
        yield engine


def answering(engine, name: str, n_answered: int = 2, prompt=PROMPT, max_tokens: int = 99, **asked: Any):
    """A request that was blended, and has begun its answer."""
    request = engine.arrived(name, prompt, **asked)
    request.max_tokens, request.sampling_params.temperature = max_tokens, 0.0
    there = engine.load(request)
    engine.step(**{name: (there, len(prompt) - there)})
    request.append_output_token_ids([7] * n_answered)
    request.num_computed_tokens = request.num_tokens - 1
    return request


def step(engine, *requests):
    """A step that computes the next token of these answers; two tell the pace how long one takes, or idles."""
    for _ in range(2):
        engine.step(**{request.request_id: (request.num_tokens - 1, 1) for request in requests})
        if engine.repair:
            break
    return engine.repair


def repaired(engine, name: str, **result: Any) -> None:
    engine.side.process_report(WorkerReport(repairs={name: RepairResult(**result)}))
    engine.step()


@pytest.mark.parametrize("local", [144, 0])
def test_a_repaired_request_that_is_preempted_tells_where_exact_tokens_begin_unless_it_blends_again(engine, local):
    """``local``: what vLLM still has of it."""
    request = answering(engine, "a")
    job = step(engine, request)
    repaired(engine, "a", tokens=len(job.span))
    before = engine.report("a")["repair"]
    request.num_preemptions = 1
    engine.side.requests.known["a"].reuse.look_up(None)
    engine.load(request, local)
    report = engine.report("a")
    assert report.get("repair") == (before if local else None) and ("approximate_from" in report) == (not local)


def test_a_repair_begins_with_the_first_approximate_token_and_what_is_exact_then_is_found_and_stored_as_such(engine):
    request, twin = answering(engine, "a", n_answered=12), engine.request("twin", PROMPT + [7] * 12)
    assert request.block_hashes[:2] == twin.block_hashes[:2] and request.block_hashes[2] != twin.block_hashes[2]
    job = step(engine, request)
    computed = len(PROMPT) + 11
    assert job.span == Span(FIRST, computed) and job.is_first and job.is_last and job.compares
    assert job.tokens.tolist() == (PROMPT + [7] * 12)[FIRST:]
    assert len(job.blocks[0]) == -(-computed // 16)
    assert step(engine, request) is None
    repaired(engine, "a", tokens=len(job.span), compared=12, differing=(0, 1, 6))
    assert request.block_hashes == twin.block_hashes
    assert engine.blocks.cached_anew == {"a": Span(FIRST, computed)}
    report = engine.report("a")
    assert report["repair"] == {"tokens": 128, "exact_from": 13, "compared": 12, "differing": (0, 1, 6)}
    assert "approximate_from" not in report
    counts = {name: engine.counters[name] for name in engine.counters if name.startswith("answer_tokens_")}
    bands = {"1-1": (1, 1), "2-2": (1, 1), "3-4": (2, 0), "5-8": (4, 1), "9-16": (4, 0)}
    assert counts == {f"answer_tokens_compared_{band}": of[0] for band, of in bands.items()} | {
        f"answer_tokens_differing_{band}": of[1] for band, of in bands.items()
    }
    engine.end(request, computed)
    assert engine.found(PROMPT + [7] * 11, exact=True) >= set(range(FIRST, computed - 16))


def test_an_audit_asks_first_and_its_outcome_reaches_report_metrics_and_hub(at_once):
    with played_engine(settings=msgspec.structs.replace(ALWAYS, audit_share=1.0), costs=FAST, audits=True) as engine:
        engine.serve("stored", text(0, 96))
        request = answering(engine, "a")
        job = step(engine, request)
        assert job.is_first and job.asks == PROMPT[-1]
        repaired(engine, "a", audit=AuditOutcome(False, 3.0))
        assert engine.report("a")["audit"] == {"agrees": False, "kl": 3.0}
        assert engine.side.repairs.audits.take_records() == [AuditRecord(NAMESPACE.digest, 0.15, False, 3.0, 0.9)]
        engine.end(request, len(PROMPT) + 1)
        assert engine.client.stats().result().namespaces[NAMESPACE.digest]["audit_disagreements"] == 1


def test_audits_come_first_and_then_the_answer_that_is_longest_to_come(engine):
    requests = [
        answering(engine, "short", max_tokens=9, prompt=text(1, 32) + text(0, 96) + text(4, 21)),
        answering(engine, "long", prompt=text(3, 32) + text(0, 96)),
        answering(engine, "audited", max_tokens=9, audit=True, prompt=text(5, 32) + text(0, 96)),
    ]
    order = [engine.repair.request] if engine.repair else []
    while job := step(engine, *requests):
        order.append(job.request)
    assert order[:1] in (["audited"], ["short"]) and set(order) == {"short", "long", "audited"}
    assert order.index("audited") < order.index("long")


def test_an_engine_that_is_not_idle_repairs_what_wants_it_always(engine):
    idle, always = (answering(engine, repair, repair=repair) for repair in ("idle", "always"))
    waiting = engine.arrived("waiting", text(9, 64))
    assert step(engine, idle, always).request == "always"
    assert step(engine, idle, always) is None
    engine.side.ended(waiting, ((),))
    assert step(engine, idle, always).request == "idle"
    others = [
        answering(engine, f"other {number}", prompt=text(10 + number, 64)) for number in range(repairs.MAX_ANSWERS)
    ]
    late = answering(engine, "late", repair="idle", prompt=text(20, 32) + text(0, 96))
    assert step(engine, late, *others) is None


def test_on_accelerators_an_answer_that_is_repaired_itself_waits_for_a_repair_and_no_other(monkeypatch, at_once):
    monkeypatch.setattr(repair_pace, "ON_CPUS", ON_ACCELERATORS._replace(idle_s=0.0, tokens=4096))
    with played_engine(settings=msgspec.structs.replace(SETTINGS, repair="idle"), costs=FAST) as engine:
        engine.serve("stored", text(0, 96))
        first = answering(engine, "first")
        other = answering(engine, "other", prompt=text(9, 64))
        assert step(engine, first, other) is None, "it would slow down the other's answer"
        engine.end(other, 65)
        second = answering(engine, "second", prompt=text(3, 32) + text(0, 96))
        assert {step(engine, first, second).request for _ in range(2)} == {"first", "second"}


def test_an_idle_device_computes_one_repair_at_a_time(engine):
    for name in ("a", "b"):
        request = answering(engine, name, repair="idle", max_tokens=9, prompt=text(len(name), 32) + text(0, 96))
        assert engine.side.ended(request, (engine.blocks.blocks,))[0]
    first = step(engine)
    assert first and step(engine) is None, "work would pile up, for which the next request would wait"
    engine.side.process_report(WorkerReport(repaired=1))
    assert step(engine).request not in (None, first.request)


@pytest.mark.parametrize("asked, max_tokens, is_beside", [
    ({"repair": "idle"}, 17, True), ({"repair": "idle"}, 16, False), ({"repair": "always"}, 16, True),
    ({"repair": "idle", "audit": True}, 16, True),
])  # fmt: skip
def test_an_answer_of_few_tokens_is_repaired_behind_its_end_unless_it_wants_more(engine, asked, max_tokens, is_beside):
    request = answering(engine, "a", max_tokens=max_tokens, **asked)
    assert (step(engine, request) is not None) == is_beside
    if not is_beside:
        other = answering(engine, "other", prompt=text(9, 64))
        assert engine.side.ended(request, (engine.blocks.blocks,))[0]
        assert step(engine, other) is None, "it would slow down the other's answer"
        assert step(engine).request == "a"


def test_with_repair_off_an_audit_waits_for_the_end_of_the_answer_which_nothing_changes(engine):
    off, audited = answering(engine, "off", repair="off"), answering(engine, "audited", repair="off", audit=True)
    assert step(engine, off, audited) is None
    assert engine.side.ended(off, (engine.blocks.blocks,))[0], "its saves need the blocks"
    assert engine.side.ended(audited, (engine.blocks.blocks,))[0]
    assert step(engine).request == "audited" and engine.side.has_work
    repaired(engine, "audited", audit=AuditOutcome(True, 0.0))
    assert not any(ended.repair.progress for ended in engine.side.requests.ended.values())
    assert engine.counters["requests_repaired"] == 1


def test_a_token_that_a_step_was_computing_when_its_request_was_aborted_is_computed_anew(engine):
    """vLLM has cached the block that ends with it."""
    request = answering(engine, "a", n_answered=11, store=False)
    request.num_computed_tokens = request.num_tokens
    assert request.num_tokens % 16 == 0 and engine.side.ended(request, (engine.blocks.blocks,))[0]
    job = step(engine)
    assert job.span == Span(FIRST, request.num_tokens) and job.is_last


def test_a_request_that_is_aborted_before_its_answer_is_not_repaired(engine):
    request = answering(engine, "a", n_answered=0, store=False)
    request.num_computed_tokens = 130
    assert not engine.side.ended(request, (engine.blocks.blocks,))[0]
    assert engine.counters["repairs_ended_not_kept"] == 1


@pytest.mark.parametrize("why", ["late", "short_of_blocks", "wanted", "cleared"])
def test_the_blocks_of_a_request_that_has_ended_are_kept_for_a_while_and_while_others_do_not_need_them(
    engine, monkeypatch, why
):
    request = answering(engine, "a", store=False)
    is_kept, _ = engine.side.ended(request, (engine.blocks.blocks,))
    assert is_kept and engine.side.has_work
    if why == "late":
        now = count(time.monotonic() + SETTINGS.repair_after_s + 1)
        monkeypatch.setattr(time, "monotonic", lambda: next(now))
    elif why == "short_of_blocks":
        engine.blocks.n_free = 20
    elif why == "wanted":
        why, engine.blocks.n_free = "short_of_blocks", 30
        engine.arrived("waiting", text(9, 31 * 16))
    else:
        engine.side.clear()
    engine.step()
    assert engine.repair is None and engine.ending == {"a"}, "the worker says that the blocks are free"
    assert engine.counters[f"repairs_ended_{why}"] == 1
    engine.side.process_report(WorkerReport(committed_ranks={"a": 1}))
    assert not engine.side.has_work


PLAIN = {
    "temperature": 0, "presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1, "logit_bias": None,
    "allowed_token_ids": None, "bad_words": [], "min_tokens": 0, "structured_outputs": None,
    "extra_args": {"kv_transfer_params": {}},
}  # fmt: skip


@pytest.mark.parametrize("asked", [{"temperature": 0.7}, {"min_tokens": 3}, {"extra_args": {"forced": [1]}}])
def test_only_answers_that_nothing_but_the_model_decides_are_compared(asked):
    assert is_plain(SimpleNamespace(**PLAIN)) and not is_plain(SimpleNamespace(**PLAIN | asked))


def slow(fixed_s: float, token_s: float, growth_s: float = 0.0) -> Costs:
    """Recomputation takes so long: in any case, for each token, and for each token before that."""
    sums = np.array([1, 10, 100, 1000, 10_000]) * token_s
    recompute = Cost(token_s, growth_s, measured=tuple((float(work), float(fixed_s + work)) for work in sums))
    return msgspec.structs.replace(FAST, recompute=recompute)


@settings(max_examples=40)
@given(
    step_s=st.floats(0.005, 0.1), share=st.floats(0.2, 3.0), fixed_s=st.floats(0.0, 0.02), factor=st.floats(0.5, 3.0),
    lag=st.integers(0, 1),
)  # fmt: skip
def test_answers_are_slowed_down_by_the_share_on_average_and_no_step_by_much_more_than_the_least_forward(
    step_s, share, fixed_s, factor, lag
):
    """``factor``: how much longer repairs take than was measured."""
    now, token_s = 0.0, 1e-4
    pace = RepairPace(slow(fixed_s, token_s), ON_CPUS._replace(share=share), lag, clock=lambda: now)
    durations, n_repaired, running = [], 0, [0.0] * lag  # the last are the steps that vLLM has planned ahead
    for _ in range(600):  # one forward more or less counts for little
        pace.begin_step(1)
        n = pace.take(Span(n_repaired, 10**9), 4096)
        n_repaired += n
        running.append(step_s + factor * (fixed_s + n * token_s if n else 0.0))
        durations.append(running.pop(0))
        now += durations[-1]
    late = durations[200:]
    least_s = factor * (fixed_s + MIN_TOKENS * token_s)
    longest = max(share, SAVED_UP_FORWARDS * least_s / step_s if least_s > 0.9 * share * step_s else 0.0)
    assert sum(late) / len(late) / step_s < 1 + 1.2 * share
    assert max(late) / step_s < 1 + 1.2 * longest
    assert sum(late) / len(late) / step_s > 1 + 0.7 * min(share, 1.0)


def test_steps_without_answers_are_as_long_as_the_next_request_may_wait():
    now = 0.0
    pace, slow_pace = (RepairPace(slow(*times), ON_CPUS, clock=lambda: now) for times in ((0.0, 1e-4), (0.1, 1e-3)))

    def take(pace, at, n_answers=0):
        nonlocal now
        now = at
        pace.begin_step(n_answers)
        return pace.take(Span(0, 5000), 4096)

    assert take(pace, 7.0) == 0 and take(pace, 7.0 + 1.1 * ON_CPUS.idle_s) == pytest.approx(
        ON_CPUS.idle_s / 1e-4, abs=1
    )
    assert pace.take(Span(0, 500), 4096) == 500 and pace.take(Span(0, 5000), 300) == 300
    # Nor does one begin before the engine has been idle for as long, which is anew after each step with an answer.
    assert not any([take(slow_pace, 8.0), take(slow_pace, 8.1), take(slow_pace, 8.3, 1), take(slow_pace, 8.4)])
    assert slow_pace.take(Span(0, 5000), 4096, at_once=True) > 0, "an audit waits for no idle time"
    assert take(slow_pace, 8.7) == pytest.approx(100 + SAVED_UP_FORWARDS * MIN_TOKENS, abs=2)


def test_on_accelerators_repairs_are_short():
    now = 0.0
    pace = RepairPace(slow(0.001, 1e-5), ON_ACCELERATORS, clock=lambda: now)
    taken: list[int] = []
    for _ in range(200):
        now += 0.05 + 1e-5 * sum(taken[-1:])
        pace.begin_step(1)
        taken.append(pace.take(Span(0, 10**9), 4096))
    assert max(taken) == ON_ACCELERATORS.tokens < 0.25 * 0.05 / 1e-5
    pace = RepairPace(slow(0.0, 1e-5), ON_ACCELERATORS, clock=lambda: now)
    for at in (100.0, 100.1):
        now = at
        pace.begin_step(0)
    assert pace.take(Span(0, 10**9), 4096) == pytest.approx(ON_ACCELERATORS.idle_s / 1e-5, abs=2)


def test_a_repair_saves_up_for_a_forward_that_is_worth_it():
    """Where the least forward takes as long as a step, one step in four or five repairs many tokens."""
    now, step_s, fixed_s, token_s, taken = 0.0, 0.05, 0.05, 5e-4, []
    pace = RepairPace(slow(fixed_s, token_s), ON_CPUS, clock=lambda: now)
    while len(taken) < 100 or not taken[-1]:
        pace.begin_step(1)
        taken.append(pace.take(Span(0, 10**9), 4096))
        now += step_s + (fixed_s + token_s * taken[-1] if taken[-1] else 0.0)
    late = [n for n in taken[50:] if n]
    assert 10 <= len(late) <= 13 and min(late) > 12 * MIN_TOKENS
    # The last tokens of a repair wait for no more than they take themselves.
    for _ in range(3):
        now += step_s
        pace.begin_step(1)
        taken.append(pace.take(Span(0, MIN_TOKENS), 4096))
    assert any(taken[-3:])


def test_tokens_far_from_the_beginning_which_take_longer_are_repaired_too():
    now, step_s, growth_s, durations = 0.0, 0.05, 1e-7, []
    pace = RepairPace(slow(0.01, 1e-3, growth_s), ON_CPUS, clock=lambda: now)
    for _ in range(400):
        pace.begin_step(1)
        n = pace.take(Span(40_000, 10**9), 4096)
        durations.append(step_s + (0.01 + n * (1e-3 + 40_000 * growth_s) if n else 0.0))
        now += durations[-1]
    assert 1.3 < sum(durations[200:]) / 200 / step_s < 1.6


@pytest.mark.parametrize("token_s", [1e-5, 3e-3])
def test_where_costs_were_not_measured_steps_tell_them(token_s):
    now, step_s, durations = 0.0, 0.05, []
    pace = RepairPace(None, ON_CPUS, clock=lambda: now)
    for _ in range(300):
        pace.begin_step(1)
        durations.append(step_s + token_s * pace.take(Span(0, 10**9), 10**6))
        now += durations[-1]
    assert 1.2 < sum(durations[200:]) / 100 / step_s < 1.6
