"""Tensor parallel: two ranks, each with half of the heads, that must do the same at the same time."""

import itertools
import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from harness.engines import Engine, disagreement
from harness.engines.shapes import GPT_OSS
from tests.vllm.conftest import ATTENDED, PROBING, SETTINGS, TOLERANCE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

RANKS: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
STOP_S = 1.0
FORKED = RANKS | {"arrange": ["tests.vllm.forked_ranks:arrange"]}


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Each rank on its core, and on the path a device whose copies end at other times on each rank."""
    site = tmp_path_factory.mktemp("site")
    facts = site / "late-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: late\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[blendhub]\nlate = tests.vllm.late_device\n")
    return {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "PYTHONPATH": f"{site}:{Path(__file__).parents[2]}"}


@pytest.mark.parametrize(
    ("batches", "ranks", "selector"),
    [
        pytest.param(2, RANKS, PROBING, id="two batches in flight", marks=[pytest.mark.long, pytest.mark.alone]),
        pytest.param(1, FORKED, ATTENDED, id="one batch at a time"),
    ],
)
def test_two_ranks_blend_as_one(batches, ranks, selector, model, plain, environment, texts):
    first, second = texts.new(400), texts.new(400)
    # Each begins with its own text: a late one would find the blended blocks of an early one.
    prompts = [[*texts.new(7), *second, *texts.new(30 + n), *first, *texts.new(9)] for n in range(3)]
    expected = [plain.one(prompt, tokens=6) for prompt in prompts]
    with Engine(model, SETTINGS | selector, variables=environment, async_scheduling=batches == 2, **ranks) as engine:
        assert engine.call("batches_in_flight") == batches
        engine.one([*first, *second])
        engine.forget()
        for ratio in (1.0, 0.3):
            answers = engine.ask(*prompts, tokens=6, recompute_ratio=ratio, store=False)
            reports = [answer.report for answer in answers]
            assert all(report["moved_tokens"] == 800 for report in reports), (reports, engine.log)
            assert all(report["recomputed_tokens"] == 800 * ratio for report in reports), (reports, engine.log)
            engine.forget()
            if ratio == 1.0:
                assert disagreement(answers, expected) < TOLERANCE


def test_two_ranks_blend_a_model_with_windows(environment, texts, tmp_path):
    """With vLLM's hybrid allocator: each rank has its heads of what the borrowed blocks hold."""
    (tmp_path / "config.json").write_text(json.dumps(GPT_OSS))
    documents = [texts.new(n) for n in (300, 260)]
    prompt = [*documents[1], *texts.new(40), *documents[0], *texts.new(30)]
    arrange = [*FORKED["arrange"], "harness.engines.wide_weights:widen"]
    options = {"load_format": "dummy", "variables": environment, "async_scheduling": False}
    with Engine(tmp_path, SETTINGS | ATTENDED, **RANKS | options, arrange=arrange) as engine:
        engine.ask(*documents)
        engine.forget()
        expected = engine.one(prompt, tokens=90, mode="off", store=False)
        engine.forget()
        blended = engine.one(prompt, tokens=90, recompute_ratio=1.0, store=False)
        assert blended.report["moved_tokens"] == blended.report["recomputed_tokens"] == 300
        assert disagreement([blended], [expected]) < TOLERANCE
        engine.forget()
        assert engine.one(prompt, recompute_ratio=0.3, store=False).report["recomputed_tokens"] == 90
        engine.forget()


@pytest.mark.parametrize("fails", [False, True], ids=["well", "not on all ranks"])
def test_ranks_whose_copies_end_at_different_times_stay_in_step(fails, model, plain, environment, texts):
    """No step waits for a copy, and what one rank does not have is computed by all."""
    first, second = texts.new(200), texts.new(200)
    prompts = [[*texts.new(7), *second, *texts.new(30 + n), *first, *texts.new(9)] for n in range(2)]
    expected = [plain.one(prompt, tokens=6) for prompt in prompts]
    settings = SETTINGS | {"device": {"name": "late", "options": {"fails": fails}}}
    with Engine(model, settings, variables=environment, **FORKED) as engine:
        engine.one([*first, *second])
        engine.forget()
        answers = engine.ask(*prompts, tokens=6, recompute_ratio=1.0, store=False)
        assert disagreement(answers, expected) < TOLERANCE
        assert all(answer.report["moved_tokens"] == (0 if fails else 400) for answer in answers)
        assert all("failed" in answer.report["reason"] for answer in answers if fails)
        assert "the engine waited for a copy" not in engine.log


@pytest.mark.long
@pytest.mark.alone
def test_a_rank_that_is_stopped_in_any_stage_of_a_load_delays_its_requests_by_that_alone(
    model, plain, environment, texts, tmp_path
):
    """The lease of the scheduler's session holds, and nothing stored is computed."""
    first, second = texts.new(200), texts.new(200)
    prompts = [[*texts.new(7), *second, *texts.new(30 + n), *first, *texts.new(9)] for n in range(2)]
    expected = [plain.one(prompt, tokens=6) for prompt in prompts]
    ranks = RANKS | {"arrange": ["tests.vllm.stopping_ranks:arrange", str(tmp_path)]}
    moments = [f"{when} {stage}" for stage in ("copy", "recompute", "release") for when in ("before", "after")]
    with Engine(model, SETTINGS, variables=environment, **ranks) as engine:
        engine.one([*first, *second])
        for moment, rank in itertools.product(moments, (0, 1)):
            if "release" in moment and rank:  # one rank releases the lease of all
                continue
            engine.forget()
            (tmp_path / str(rank)).write_text(f"{moment} {STOP_S}")
            started = time.monotonic()
            answers = engine.ask(*prompts, tokens=6, recompute_ratio=1.0, store=False)
            assert time.monotonic() - started < STOP_S + 5, moment
            assert disagreement(answers, expected) < TOLERANCE, moment
            assert [answer.report["moved_tokens"] for answer in answers] == [400, 400], (moment, engine.log[-3000:])
            assert not list(tmp_path.iterdir()), moment


def test_a_rank_without_memory_for_a_forward_ends_the_engine_at_once(model, environment, texts):
    """The other rank waits for it in that forward, and would do so until a timeout of minutes."""
    first, second = texts.new(200), texts.new(200)
    settings = SETTINGS | {"device": {"name": "late", "options": {"crowds": True}}}
    engine = Engine(model, settings, variables=environment, **FORKED)
    try:
        engine.one([*first, *second])
        engine.forget()
        started = time.monotonic()
        with pytest.raises(RuntimeError):
            engine.one([*second, *texts.new(30), *first, *texts.new(9)], recompute_ratio=1.0, store=False)
        assert time.monotonic() - started < 150
        assert "tried to allocate 2 GiB (rank 1 of 2); the engine ends" in engine.log
    finally:
        with suppress(RuntimeError):
            engine.close()
