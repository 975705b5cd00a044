"""Few blocks for many answers: vLLM takes blocks away from requests, and computes them again."""

import pytest

from harness.engines import Engine, disagreement
from tests.vllm.arrangements import fail_repairs, inside, unfinished_repairs
from tests.vllm.conftest import BEFORE, SETTINGS, TOLERANCE, MovingPrompt, from_the_arena, moved, store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

BLENDED = {"recompute_ratio": 0.0, "store": False}


@pytest.fixture(scope="module")
def engine(model):
    with Engine(model, SETTINGS, num_gpu_blocks_override=58, max_model_len=1024) as engine:
        yield engine
        assert inside(engine, unfinished_repairs) == 0


def preempted(engine, prompts, **asked):
    """Long answers to all prompts at once, for which there are too few blocks."""
    before = engine.call("preemptions")
    answers = engine.ask(*prompts, tokens=100, **asked)
    assert engine.call("preemptions") > before
    return answers


@pytest.mark.versions
@pytest.mark.parametrize("is_cached", [False, True], ids=["from the arena", "and their donor"])
def test_preempted_requests_at_first_and_with_settled_blocks(engine, plain, texts, is_cached):
    shared = texts.new(300)
    prompts = [[*texts.new(20), *shared, *texts.new(20)] for _ in range(8)]
    store(engine, donor := [*shared, *texts.new(60)])
    others = [donor] if is_cached else []
    if is_cached:
        engine.one(donor)
    rounds = [preempted(engine, [*others, *prompts], recompute_ratio=1.0)[len(others) :] for _ in range(2)]
    assert any(answer.report["copied_tokens"] for answer in rounds[0]) == is_cached
    assert any(answer.report["settled_tokens"] for answer in rounds[1])
    engine.forget()
    expected = plain.ask(*prompts, tokens=100)
    for answers in rounds:
        assert disagreement(answers, expected) < TOLERANCE


@pytest.fixture
def prompts(engine, texts):
    """Prompts that move two documents."""
    first, second = texts.new(250), texts.new(250)
    store(engine, [*first, *second])
    return [[*texts.new(BEFORE), *second, *texts.new(20), *first, *texts.new(9)] for _ in range(3)]


def test_a_repair_that_is_preempted_or_fails_ends_without_harm(engine, plain, prompts):
    """vLLM takes the blocks of requests that are answered, and that have ended and are kept."""
    answers = preempted(engine, prompts, repair="always", recompute_ratio=1.0, store=False)
    assert disagreement(answers, plain.ask(*prompts, tokens=100)) < TOLERANCE
    engine.forget()
    inside(engine, fail_repairs, True)
    answer = engine.one(prompts[0], 20, repair="always", **BLENDED)
    inside(engine, fail_repairs, False)
    assert "repair" not in answer.report and answer.report["approximate_from"] == BEFORE
    counts = engine.call("counts")
    assert counts["repairs_ended_failed"] == 1 and "request-" in engine.log and "is not repaired" in engine.log
    engine.forget()


def test_a_hold_of_a_request_that_is_preempted_or_that_fails_lets_the_tokens_go(engine, plain, prompts):
    before = engine.call("counts").get("answers_held", 0)
    answers = preempted(engine, prompts, doubt=1e6, **BLENDED)
    assert engine.call("counts")["answers_held"] >= before + 3
    assert disagreement(answers, plain.ask(*prompts, tokens=100)) < TOLERANCE
    engine.forget()
    unheld = engine.one(prompts[0], 20, doubt=0.0, **BLENDED)
    engine.forget()
    inside(engine, fail_repairs, True)
    answer = engine.one(prompts[0], 20, doubt=1e6, **BLENDED)
    inside(engine, fail_repairs, False)
    assert answer.tokens == unheld.tokens and answer.report["approximate_from"] == BEFORE
    assert "repair" not in answer.report
    engine.forget()


def test_what_vllm_evicts_for_the_prompt_itself_comes_from_the_arena(engine, texts):
    prompts = MovingPrompt(texts, 450)
    expected = from_the_arena(engine, prompts)
    engine.one(prompts.before)
    answer = moved(engine, prompts)
    assert 100 < answer.report["copied_tokens"] < answer.report["moved_tokens"]
    assert (prompts.kv(answer) == expected).all()
    engine.forget()
