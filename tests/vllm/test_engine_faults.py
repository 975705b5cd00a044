"""Whatever becomes of the hub, every answer must be what vLLM alone would answer."""

import itertools
import os
import signal
import threading
import time

import pytest

from harness.engines import Engine, disagreement
from tests.hub.processes import HubProcess
from tests.vllm.conftest import ON_THE_SECOND_RUNNER, SETTINGS, TOLERANCE, reused

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def hub(tmp_path):
    hub = HubProcess(tmp_path, arena_gib=0.25)
    yield hub
    hub.kill()


@pytest.mark.parametrize(
    "asynchronous",
    [
        pytest.param(True, id="two batches in flight", marks=pytest.mark.versions),
        pytest.param(False, id="one batch at a time", marks=pytest.mark.long),
    ],
)
def test_the_hub_is_killed_and_comes_back(asynchronous, model, plain, hub, texts):
    first, second = texts.new(500), texts.new(500)
    prompts = [[*second, *texts.new(7 + n), *first, *texts.new(9)] for n in range(12)]
    expected = plain.ask(*prompts, tokens=4)
    settings = SETTINGS | {"endpoint": hub.endpoint, "hub": {}, "lookup_timeout_s": 0.5}
    with Engine(model, settings, async_scheduling=asynchronous) as engine:
        engine.one([*first, *second])
        engine.forget()
        killer = threading.Timer(0.05, lambda: os.kill(hub.process.pid, signal.SIGKILL))
        killer.start()
        during = engine.ask(*prompts, tokens=4, recompute_ratio=1.0)
        killer.join()
        assert disagreement(during, expected) < TOLERANCE
        engine.forget()
        without = engine.ask(*prompts, tokens=4, recompute_ratio=1.0)
        assert disagreement(without, expected) < TOLERANCE
        assert all("reason" in answer.report for answer in without)
        hub.process.wait()
        hub.start()
        until = time.monotonic() + 30
        while time.monotonic() < until:
            engine.forget()
            again = engine.ask(*prompts, tokens=4, recompute_ratio=1.0)
            assert disagreement(again, expected) < TOLERANCE
            if all("reason" not in answer.report for answer in again):
                break
            time.sleep(0.1)
        else:
            pytest.fail(f"nothing is reused after the hub is back: {again[0].report}")


def test_an_arena_that_is_far_too_small(model, plain, texts):
    documents = [texts.new(300) for _ in range(8)]
    settings = SETTINGS | {"hub": {"arena_gib": 0.003, "metrics": "", "embedded": "process"}}
    with Engine(model, settings) as engine:
        assert "embedded hub in a process; arena 3" in engine.log
        assert "less than one prompt of max_model_len 2,048" in engine.log
        for document in documents:
            engine.one(document)
        engine.forget()
        prompts = [[*texts.new(20), *one, *texts.new(20), *other] for one, other in itertools.pairwise(documents)]
        answers = engine.ask(*prompts, tokens=4, recompute_ratio=1.0)
    assert disagreement(answers, plain.ask(*prompts, tokens=4)) < TOLERANCE


def test_files_of_the_store_are_damaged(model, plain, texts, tmp_path):
    documents = [texts.new(300) for _ in range(6)]
    # What is exact is not recomputed, so that wrong bytes would show.
    prompts = [[*documents[n], *texts.new(20), *documents[n - 1], *texts.new(9)] for n in range(6)]
    store = {"name": "disk", "options": {"path": str(tmp_path / "store"), "capacity_gib": 0.1}}
    settings = SETTINGS | {"hub": {"arena_gib": 0.05, "metrics": "", "store": store}, "lookup_timeout_s": 5.0}
    with Engine(model, settings) as engine:
        for document in documents:
            engine.one(document)
    files = sorted(path for path in (tmp_path / "store").rglob("*") if path.is_file() and path.stat().st_size > 100_000)
    assert len(files) >= 6
    for path in files[: len(files) // 2]:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 0xFF
        path.write_bytes(content)
    # Another life of the engine: all it can have is on the disk.
    with Engine(model, settings) as engine:
        answers = engine.ask(*prompts, tokens=4, recompute_ratio=1.0)
    assert disagreement(answers, plain.ask(*prompts, tokens=4)) < TOLERANCE
    # Three of the six documents are damaged, and each stands in two prompts.
    assert sum(map(reused, answers)) == 2 * 3 * 300


@pytest.mark.parametrize(
    "runner, n_prompts, tokens, blocks",
    [
        pytest.param({}, 8, 100, 60, id="first runner", marks=pytest.mark.versions),
        pytest.param({"async_scheduling": False}, 8, 100, 60, id="one batch at a time", marks=pytest.mark.long),
        # Its kernels run in an interpreter, which takes it half a second for each step.
        pytest.param(ON_THE_SECOND_RUNNER, 4, 60, 47, id="second runner", marks=pytest.mark.long),
    ],
)
def test_preempted_requests_at_first_and_with_settled_blocks(runner, n_prompts, tokens, blocks, model, plain, texts):
    """Few blocks for many answers: vLLM takes blocks away from requests, and computes them again."""
    shared = texts.new(300)
    prompts = [[*texts.new(20), *shared, *texts.new(20)] for _ in range(n_prompts)]
    with Engine(model, SETTINGS, num_gpu_blocks_override=blocks, max_model_len=1024, **runner) as engine:
        engine.one([*shared, *texts.new(5)])
        engine.forget()
        rounds = [engine.ask(*prompts, tokens=tokens, recompute_ratio=1.0) for _ in range(2)]
        assert engine.call("preemptions") > 0
        assert any(answer.report["settled_tokens"] for answer in rounds[1])
        engine.forget()
    expected = plain.ask(*prompts, tokens=tokens)
    for answers in rounds:
        assert disagreement(answers, expected) < TOLERANCE
