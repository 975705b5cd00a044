"""Repair and doubt: an answer begins behind blended KV, and goes on from exact KV.

With doubt, a token of which the model is unsure waits for that.
"""

from typing import Any

import pytest

from harness.engines import Engine, disagreement, largest_difference
from tests.vllm.arrangements import inside, unfinished_repairs
from tests.vllm.conftest import BEFORE, ROUNDING, SETTINGS, TOLERANCE, blended_prompt, exactly

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TOKENS, BLOCK = 40, 32
ALWAYS = 1e6
"""A margin that no token of the model reaches."""
BLENDED: dict[str, Any] = {"recompute_ratio": 0.0, "store": False}


@pytest.fixture(scope="module")
def engine(model):
    with Engine(model, SETTINGS) as engine:
        yield engine
        assert not [name for name in engine.call("counts") if "failed" in name]
        assert inside(engine, unfinished_repairs) == 0


def next_turn(engine, plain, said, texts):
    """The report of the next turn, whose answer is the model's own."""
    turn = [*said, *texts.new(100)]
    answer = engine.one(turn, 4, mode="exact", store=False)
    assert disagreement([answer], [plain.one(turn, 4)]) < TOLERANCE
    return answer.report


def differing(answer, plain, prompt) -> list[int]:
    """The places of an answer's tokens that the model alone would not say behind the tokens before them."""
    asked = [[*prompt, *answer.tokens[:number]] for number in range(len(answer.tokens))]
    likeliest = [answer.tokens[0] for answer in plain.ask(*asked)]
    return [number for number, token in enumerate(answer.tokens) if token != likeliest[number]]


@pytest.mark.versions
def test_an_answer_and_the_next_turn_go_on_from_exact_kv_and_the_report_says_which_tokens_differ(engine, plain, texts):
    assert engine.call("batches_in_flight") == 2
    prompt = blended_prompt(engine, texts)
    answer = engine.one(prompt, TOKENS, repair="always", recompute_ratio=0.0, audit=True)
    report, n = answer.report, len(prompt) + TOKENS
    assert report["moved_tokens"] == 500 and "approximate_from" not in report
    repair = report["repair"]
    assert 2 < repair["exact_from"] < TOKENS // 2 and repair["compared"] == repair["exact_from"] - 2
    assert repair["tokens"] == len(prompt) + repair["exact_from"] - 2 - BEFORE
    wrong = [number for number in differing(answer, plain, prompt) if number < repair["compared"]]
    assert list(repair["differing"]) == wrong != []
    assert all(number < repair["exact_from"] - 1 for number in differing(answer, plain, prompt))
    assert report["audit"]["agrees"] == (0 not in repair["differing"]) and report["audit"]["kl"] > 1e-4
    assert exactly(answer, plain, prompt)
    assert next_turn(engine, plain, [*prompt, *answer.tokens], texts)["engine_tokens"] == (n - 1) // BLOCK * BLOCK
    engine.forget()  # from here on the hub alone has what was said before
    assert next_turn(engine, plain, [*prompt, *answer.tokens], texts)["exact_tokens"] == n - 1
    counts = engine.call("counts")
    assert counts["requests_repaired"] == 1 and counts["tokens_repaired"] == repair["tokens"]
    engine.forget()


@pytest.mark.parametrize("repair", ["always", "idle"])
def test_what_ended_too_early_or_was_aborted_is_repaired_after_its_end(engine, plain, texts, repair):
    prompt = blended_prompt(engine, texts)
    answer = engine.one(prompt, 1, repair=repair, store=False)
    assert answer.report["approximate_from"] == BEFORE and "repair" not in answer.report
    turn = next_turn(engine, plain, [*prompt, *answer.tokens], texts)
    assert turn["engine_tokens"] == len(prompt) // BLOCK * BLOCK
    engine.forget()
    stopped = engine.one(prompt, TOKENS, mode="off", store=False).tokens[1]
    engine.forget()
    answer = engine.one(prompt, TOKENS, repair=repair, recompute_ratio=1.0, stop_token_ids=[stopped], store=False)
    assert len(answer.tokens) == 2
    assert next_turn(engine, plain, [*prompt, *answer.tokens], texts)["engine_tokens"] >= len(prompt) // BLOCK * BLOCK
    engine.forget()
    before = engine.call("counts")["requests_repaired"]
    engine.ask(prompt, tokens=1000, repair=repair, store=False, abort_after=2.0)
    assert engine.call("counts")["requests_repaired"] == before + 1
    engine.forget()


@pytest.mark.versions
def test_of_requests_that_share_blocks_each_is_repaired_and_the_others_are_answered_no_worse(engine, plain, texts):
    """What is repaired in shared blocks is exact for all: every token before it is exact by then."""
    prompt = blended_prompt(engine, texts)
    engine.one(prompt, 1, store=False)
    asked = [{"repair": repair, "store": False} for repair in ("off", "always", "always")]
    prompts = [[*prompt, *texts.new(20 + number)] for number in range(3)]
    answers = engine.ask(*prompts, tokens=TOKENS, each=asked)
    n_shared = len(prompt) // BLOCK * BLOCK
    assert all(answer.report["settled_tokens"] == n_shared - BEFORE for answer in answers)
    assert exactly(answers[1], plain, prompts[1]) and exactly(answers[2], plain, prompts[2])
    assert not exactly(answers[0], plain, prompts[0]), "its own tokens behind the shared ones stay as they were"
    assert answers[0].report["approximate_from"] == BEFORE
    expected = plain.one(prompts[0]).kv(n_shared)
    assert largest_difference(answers[0].kv(n_shared), expected) < ROUNDING
    assert next_turn(engine, plain, prompt, texts)["engine_tokens"] == n_shared
    engine.forget()


# Doubt.


@pytest.mark.versions
def test_an_answer_in_doubt_from_the_start_is_the_models_own_and_is_found_as_exact(engine, plain, texts):
    assert engine.call("batches_in_flight") == 2
    prompt, repaired = blended_prompt(engine, texts), engine.call("counts").get("requests_repaired", 0)
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
    assert counts["answers_held"] == 1 and counts["requests_repaired"] == repaired + 1
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
    differing = engine.call("counts").get("answers_held_differing", 0)
    answer = engine.one(prompt, TOKENS, doubt=(least + next_least) / 2, **BLENDED)
    doubt = answer.report["doubt"]
    assert engine.call("counts").get("answers_held_differing", 0) == differing + (not doubt["agrees"])
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


def test_an_answer_that_ends_with_the_held_token_is_exact_in_the_next_turn(engine, plain, texts):
    prompt = blended_prompt(engine, texts)
    answer = engine.one(prompt, 1, doubt=ALWAYS, recompute_ratio=0.0)
    assert disagreement([answer], [plain.one(prompt)]) < TOLERANCE
    turn = [*prompt, *answer.tokens, *texts.new(50)]
    assert engine.one(turn, mode="exact", store=False).report["engine_tokens"] == len(prompt) // BLOCK * BLOCK
    engine.forget()
