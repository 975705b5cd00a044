"""Repair: an answer begins behind blended KV, and goes on from exact KV."""

import pytest

from harness.engines import Engine, disagreement, largest_difference
from tests.vllm.adapters import make_adapter
from tests.vllm.arrangements import fail_repairs, inside, unfinished_repairs
from tests.vllm.conftest import BEFORE, ROUNDING, SETTINGS, TOLERANCE, blended_prompt, exactly, store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TOKENS, BLOCK = 40, 32


@pytest.fixture(scope="module")
def engine(model):
    with Engine(model, SETTINGS, enable_lora=True, max_lora_rank=8) as engine:
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


def test_a_request_with_an_adapter_is_answered_as_without_reuse(engine, texts, tmp_path):
    """vLLM sets up its own forwards alone for adapters, so nothing is blended, and nothing repaired."""
    prompt, lora = blended_prompt(engine, texts), ("adapter", str(make_adapter(tmp_path / "lora", seed=3)))
    expected = engine.one(prompt, TOKENS, mode="off", lora=lora, store=False)
    answer = engine.one(prompt, TOKENS, repair="always", audit=True, lora=lora, store=False)
    assert not {"repair", "audit", "approximate_from"} & set(answer.report)
    assert disagreement([answer], [expected]) < TOLERANCE
    engine.forget()


def test_a_repair_that_fails_or_is_preempted_ends_without_harm(model, plain, texts):
    """vLLM has few blocks: it takes those of requests that are answered, and that have ended and are kept."""
    documents = [texts.new(250) for _ in range(2)]
    prompts = [[*texts.new(BEFORE), *documents[1], *texts.new(20), *documents[0], *texts.new(9)] for _ in range(3)]
    with Engine(model, SETTINGS, num_gpu_blocks_override=58, max_model_len=1024) as engine:
        store(engine, [*documents[0], *documents[1]])
        answers = engine.ask(*prompts, tokens=100, repair="always", recompute_ratio=1.0, store=False)
        assert engine.call("preemptions") > 0
        assert disagreement(answers, plain.ask(*prompts, tokens=100)) < TOLERANCE
        engine.forget()
        inside(engine, fail_repairs)
        answer = engine.one(prompts[0], 20, repair="always", recompute_ratio=0.0, store=False)
        assert "repair" not in answer.report and answer.report["approximate_from"] == BEFORE
        counts = engine.call("counts")
        assert counts["repairs_ended_failed"] == 1 and "request-" in engine.log and "is not repaired" in engine.log
