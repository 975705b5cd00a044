"""The scheduler side of doubt: for which tokens workers look at the margin, and what follows from their reports.

The hub is real, and the worker is played.
"""

import msgspec
import pytest

from blendhub import Span
from blendhub.client.wire import FIRST_RATIO
from blendhub.hub.ratios import STEP
from blendhub.outcome.report import RepairOutcome
from blendhub.vllm.costs import Cost, Costs
from blendhub.vllm.messages import HeldToken, RepairResult, WorkerReport
from blendhub.vllm.scheduler.repairs import REPORT_STEPS
from tests.vllm.played_engine import BLOCK, SETTINGS, played_engine, text

DOUBT = 0.25
PROMPT = text(1, 32) + text(0, 96) + text(2, 21)
FIRST, N = 32, len(PROMPT)
"""The first approximate token, and the end of the prompt."""
SECOND = Cost(0.01)
COSTS = Costs(
    prefill=SECOND, probe=Cost(1e-9), recompute=SECOND, load=Cost(1e-9), engine_tokens=4096, token_bytes=1000.0
)


@pytest.fixture
def settings():
    return msgspec.structs.replace(SETTINGS, doubt=DOUBT)


@pytest.fixture
def engine(settings):
    with played_engine(settings=settings, costs=COSTS, audits=True, holds=True) as engine:
        engine.serve("stored", text(0, 96))
        yield engine


def arrived(engine):
    """A blended request whose prompt is to be computed behind what was loaded; returns where that ends, too."""
    request = engine.request("a", PROMPT)
    request.sampling_params.temperature = 0.0
    engine.side.arrived(request)
    return request, engine.load(request)


def step(engine, request, before: int, n_scheduled: int = 1):
    engine.step(**{request.request_id: (before, n_scheduled)})
    return engine.doubts[0] if engine.doubts else None


def said(request, n: int = 1) -> None:
    request.append_output_token_ids([7] * n)


def report(engine, name: str = "a", **result) -> None:
    engine.side.process_report(WorkerReport(repairs={name: RepairResult(**result)}))


def held(step: int, position: int) -> HeldToken:
    return HeldToken(step, position, 0.125, False, 0.5, 1.5)


def test_the_first_token_is_looked_at_and_each_job_brings_what_the_workers_do_not_know(engine):
    request, there = arrived(engine)
    engine.blocks.blocks = list(range(1, 1 - (-N // BLOCK)))
    assert step(engine, request, there, N - 1 - there) is None, "behind a chunk of the prompt nothing is sampled"
    job = step(engine, request, N - 1)
    assert job.span == Span(FIRST, N) and job.is_first and job.margin == DOUBT and job.prompt_tokens == N
    assert job.tokens.tolist() == PROMPT[FIRST:-1] and job.compares
    assert job.blocks[0].tolist() == engine.blocks.blocks and job.seconds == pytest.approx(0.01 * (N - FIRST))
    said(request)
    job = step(engine, request, N)
    assert job.span == Span(FIRST, N + 1) and not job.is_first
    assert job.tokens.tolist() == PROMPT[-1:] and not job.blocks[0].size
    # vLLM plans a step ahead: it does not know the last token, which the runner has.
    job = step(engine, request, N + 1)
    assert job.span == Span(FIRST, N + 2) and job.tokens.tolist() == [7] and not job.blocks[0].size
    assert step(engine, request, N + 2) is None, "no runner has two tokens that vLLM does not know"
    said(request, BLOCK)
    engine.blocks.blocks.append(500)
    job = step(engine, request, request.num_tokens - 1)
    assert job.blocks[0].tolist() == [500] and len(job.tokens) == BLOCK - 1


def test_what_was_held_before_a_preemption_says_nothing_of_what_was_loaded_after_it(engine):
    request, there = arrived(engine)
    step(engine, request, there, N - there)
    number = engine.side._n_steps
    progress = engine.side.requests.known["a"].repair.progress
    engine.side.repairs._give_up(engine.side.requests.known["a"], "preempted")
    engine.side.repairs.begin(engine.side.requests.known["a"])
    job = step(engine, request, there, N - there)
    assert job.is_first and engine.side.requests.known["a"].repair.progress is not progress
    report(engine, tokens=9, held=held(number, N))
    assert engine.report("a")["approximate_from"] == FIRST


def test_a_token_held_behind_the_end_of_an_answer_is_not_counted(engine):
    request, there = arrived(engine)
    step(engine, request, there, N - there)
    said(request)
    step(engine, request, N)
    report(engine, tokens=9, held=held(engine.side._n_steps, N + 1))
    assert not engine.counters["answers_held"] and "doubt" not in engine.report("a")


def test_a_token_that_did_not_wait_is_counted_and_what_is_too_long_is_repaired_before(settings):
    settings, cheap = msgspec.structs.replace(settings, doubt_pause_s=1e-9), Cost(1e-8)
    costs = msgspec.structs.replace(COSTS, recompute=cheap)
    with played_engine(settings=settings, costs=costs, audits=True, holds=True) as engine:
        engine.serve("stored", text(0, 96))
        request, there = arrived(engine)
        step(engine, request, there, N - there)
        said(request)
        engine.side.process_report(WorkerReport(margins={"a": 0.2}))
        engine.side.process_report(WorkerReport(margins={"a": 0.4, "gone": 0.1}))
        assert engine.report("a")["doubt"]["passed"] == 1 and engine.counters["tokens_doubted"] == 1
        for _ in range(3):  # the first ones show how long a step takes
            step(engine, request, N)
        assert engine.repair, "repair is off for what can wait alone"


@pytest.mark.parametrize("is_held", [True, False])
def test_blocks_are_kept_until_the_workers_have_said_whether_the_last_token_was_held(engine, is_held):
    request, there = arrived(engine)
    step(engine, request, there, N - there)
    number = engine.side._n_steps
    said(request)
    request.num_computed_tokens = N
    keeps, _ = engine.side.ended(request, (list(range(1, 11)),))
    assert keeps
    engine.step()
    if is_held:
        report(engine, tokens=N - FIRST, held=held(number, N))
        assert engine.blocks.cached_anew == {"a": Span(FIRST, N)}
    ending = [engine.ending]
    for _ in range(REPORT_STEPS):
        engine.step()
        ending.append(engine.ending)
    assert engine.counters["answers_held"] == is_held and ending.count({"a"}) == 1
    assert is_held or ending[-1] == {"a"}, "the workers have yet to report"


def test_where_the_ratio_is_auto_the_hub_says_it_and_learns_from_requests_without_a_salt_or_a_ratio_of_their_own(
    settings,
):
    settings = msgspec.structs.replace(settings, recompute_ratio="auto")
    with played_engine(settings=settings, costs=COSTS, audits=True, holds=True) as engine:
        engine.serve("stored", text(0, 96))
        engine.serve("salted", text(0, 96), salt="ann")

        def ratios(name: str, salt: str | None = None, **asked):
            engine.serve(name, text(3, 32) + text(0, 96) + text(4, 21), salt=salt, store=False, **asked)
            told = engine.client.explain(name).result().outcome
            assert told
            return told.ratio, told.has_found_ratio

        assert ratios("own", recompute_ratio=0.5) == (0.5, False) and ratios("other", salt="ann") == (0.3, False)
        assert ratios("first") == (0.3, True)
        outcome = engine.client.explain("first").result().outcome
        wrong = msgspec.structs.replace(outcome, answer_tokens=9, repair=RepairOutcome(9, 10, 9, (1, 2, 3)))
        engine.client.report([wrong]).result()
        ratios("hears")
        assert ratios("next") == (pytest.approx(FIRST_RATIO / STEP), True)
