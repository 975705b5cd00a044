"""Doubt: where the model is unsure of a token behind blended KV, the token follows from exact KV."""

from typing import Any

import pytest

from harness.engines import Engine, disagreement
from tests.vllm.arrangements import fail_repairs, inside, unfinished_repairs
from tests.vllm.conftest import BEFORE, SETTINGS, TOLERANCE, blended_prompt, exactly, store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TOKENS, BLOCK = 24, 32
ALWAYS = 1e6
"""A margin that no token of the model reaches."""
BLENDED: dict[str, Any] = {"recompute_ratio": 0.0, "store": False}


@pytest.fixture(scope="module")
def engine(model):
    with Engine(model, SETTINGS) as engine:
        yield engine
        assert inside(engine, unfinished_repairs) == 0


@pytest.mark.versions
def test_an_answer_in_doubt_from_the_start_is_the_models_own_and_is_found_as_exact(engine, plain, texts):
    assert engine.call("batches_in_flight") == 2
    prompt = blended_prompt(engine, texts)
    answer = engine.one(prompt, TOKENS, doubt=ALWAYS, recompute_ratio=0.0)
    report = answer.report
    assert report["moved_tokens"] == 500 and "approximate_from" not in report
    assert disagreement([answer], [plain.one(prompt, TOKENS)]) < TOLERANCE
    doubt, repair = report["doubt"], report["repair"]
    assert doubt["token"] == repair["exact_from"] == 1 and doubt["passed"] == 0
    assert doubt["kl"] > 1e-4 and doubt["seconds"] > 0 and repair["tokens"] == len(prompt) - BEFORE
    assert exactly(answer, plain, prompt)
    engine.forget()  # from here on the hub alone has it
    turn = [*prompt, *answer.tokens, *texts.new(50)]
    assert engine.one(turn, mode="exact", store=False).report["exact_tokens"] == len(prompt) + TOKENS - 1
    counts = engine.call("counts")
    assert counts["answers_held"] == counts["requests_repaired"] == 1
    engine.forget()


def margins(answer) -> list[float]:
    """By how much the second token was less likely than the first one."""
    best = [sorted(likely.values(), reverse=True) for likely in answer.logprobs]
    return [first - second for first, second, *_ in best]


def test_the_first_token_with_a_smaller_margin_is_held_and_those_before_it_are_as_they_were(engine, plain, texts):
    prompt = blended_prompt(engine, texts)
    before = engine.one(prompt, TOKENS, doubt=0.0, **BLENDED)
    assert "doubt" not in before.report and before.report["approximate_from"] == BEFORE
    engine.forget()
    least, next_least, *_ = sorted(margins(before))
    number = margins(before).index(least)
    answer = engine.one(prompt, TOKENS, doubt=(least + next_least) / 2, **BLENDED)
    doubt = answer.report["doubt"]
    assert doubt["token"] == number + 1 and doubt["margin"] == pytest.approx(least, abs=1e-4)
    assert answer.tokens[:number] == before.tokens[:number]
    assert doubt["agrees"] == (answer.tokens[number] == before.tokens[number])
    own = plain.one([*prompt, *answer.tokens[:number]], TOKENS - number)
    assert answer.tokens[number:] == own.tokens and exactly(answer, plain, prompt)
    engine.forget()


def test_requests_in_doubt_at_once_share_forwards_and_each_is_exact_also_where_they_share_blocks(engine, plain, texts):
    prompt = blended_prompt(engine, texts)
    engine.one(prompt, 1, **BLENDED)
    prompts = [[*prompt, *texts.new(20 + number)] for number in range(3)]
    held = engine.call("counts").get("answers_held", 0)
    answers = engine.ask(*prompts, tokens=TOKENS, each=[{"doubt": ALWAYS, **BLENDED}] * 2 + [{"doubt": 0.0, **BLENDED}])
    assert engine.call("counts")["answers_held"] == held + 2
    assert disagreement(answers[:2], plain.ask(*prompts[:2], tokens=TOKENS)) < TOLERANCE
    assert exactly(answers[0], plain, prompts[0]) and exactly(answers[1], plain, prompts[1])
    assert "doubt" not in answers[2].report and answers[2].report["approximate_from"] == BEFORE
    engine.forget()


@pytest.mark.parametrize(
    ("sampling", "is_held"),
    [
        ({"logit_bias": {7: 100.0}}, False),
        ({"allowed_token_ids": [7]}, False),
        ({"allowed_token_ids": [7, 8, 9]}, True),
        ({"frequency_penalty": 1.0, "presence_penalty": 1.0}, True),
        ({"temperature": 0.5, "seed": 1}, False),
    ],
)
def test_the_margin_is_that_of_what_is_sampled(engine, plain, texts, sampling, is_held):
    """A bias of 100 leaves no doubt, nor does a single token that is allowed; and chance decides of no token."""
    prompt = blended_prompt(engine, texts)
    answer = engine.one(prompt, TOKENS, doubt=50.0, sampling=sampling, **BLENDED)
    assert ("doubt" in answer.report) == is_held
    if is_held:
        assert disagreement([answer], [plain.one(prompt, TOKENS, sampling=sampling)]) < TOLERANCE
        assert exactly(answer, plain, prompt)
    engine.forget()


def test_what_takes_longer_than_the_bound_is_repaired_before_and_what_ends_at_once_is_told(model, plain, texts):
    with Engine(model, SETTINGS | {"doubt_pause_s": 0.0, "doubt": ALWAYS}) as engine:
        prompt = blended_prompt(engine, texts)
        answer = engine.one(prompt, TOKENS, **BLENDED)
        report = answer.report
        assert report["doubt"]["token"] == 0 and 0 < report["doubt"]["passed"] == report["repair"]["exact_from"] - 1
        assert exactly(answer, plain, prompt)
        assert engine.call("counts")["tokens_doubted"] == report["doubt"]["passed"]
        engine.forget()


def test_an_answer_that_ends_with_the_held_token_is_exact_in_the_next_turn(engine, plain, texts):
    prompt = blended_prompt(engine, texts)
    answer = engine.one(prompt, 1, doubt=ALWAYS, recompute_ratio=0.0)
    assert disagreement([answer], [plain.one(prompt)]) < TOLERANCE
    turn = [*prompt, *answer.tokens, *texts.new(50)]
    assert engine.one(turn, mode="exact", store=False).report["engine_tokens"] == len(prompt) // BLOCK * BLOCK
    engine.forget()


def test_a_hold_that_fails_or_a_request_that_is_preempted_lets_the_tokens_go(model, plain, texts):
    documents = [texts.new(250) for _ in range(2)]
    prompts = [[*texts.new(BEFORE), *documents[1], *texts.new(20), *documents[0], *texts.new(9)] for _ in range(3)]
    with Engine(model, SETTINGS, num_gpu_blocks_override=58, max_model_len=1024) as engine:
        store(engine, [*documents[0], *documents[1]])
        answers = engine.ask(*prompts, tokens=100, doubt=ALWAYS, **BLENDED)
        assert engine.call("preemptions") > 0 and engine.call("counts")["answers_held"] >= 3
        assert disagreement(answers, plain.ask(*prompts, tokens=100)) < TOLERANCE
        engine.forget()
        unheld = engine.one(prompts[0], 20, doubt=0.0, **BLENDED)
        engine.forget()
        inside(engine, fail_repairs)
        answer = engine.one(prompts[0], 20, doubt=ALWAYS, **BLENDED)
        assert answer.tokens == unheld.tokens and answer.report["approximate_from"] == BEFORE
        assert "repair" not in answer.report and "is not repaired" in engine.log
        assert inside(engine, unfinished_repairs) == 0
