"""A trained model answers questions that others wrote, behind solved ones: token for token as without BlendHub."""

import json
from typing import Any

import pytest

from harness.engines import ONE_THREAD, Engine
from harness.engines.real_model import PACKAGES, NoRealModel, make_real_model
from tests.vllm.conftest import SETTINGS

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1200)]

BFCL = PACKAGES / "bfcl_eval" / "data"
SOLVED, ASKED, ANSWER_TOKENS = 12, 50, 32
EXACT: dict[str, Any] = {"mode": "exact", "hub": {"arena_gib": 2.0, "metrics": ""}}


def entries(name: str) -> list[Any]:
    return [json.loads(line) for line in (BFCL / name).read_text().splitlines()]


def few_shot_prompts() -> list[str]:
    """The questions, most of which ask for a calculation: each behind the same solved ones, as in GSM8K."""
    asked = [entry["question"][0][0]["content"] for entry in entries("BFCL_v4_simple_python.json")]
    calls = [json.dumps(entry["ground_truth"][0]) for entry in entries("possible_answer/BFCL_v4_simple_python.json")]
    pairs = list(zip(asked, calls, strict=True))[:SOLVED]
    solved = "".join(f"Question: {question}\nCall: {call}\n\n" for question, call in pairs)
    return [f"{solved}Question: {question}\nCall:" for question in asked[SOLVED : SOLVED + ASKED]]


@pytest.fixture(scope="module")
def model():
    if not BFCL.exists():
        pytest.skip(f"{BFCL} is missing; `make setup` downloads it")
    try:
        return make_real_model()
    except NoRealModel as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def prompts(model) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    return [tokenizer.encode(prompt) for prompt in few_shot_prompts()]


def answers(engine: Engine, prompts: list[list[int]], **asked: Any) -> Any:
    """What the engine answers to all at once, with an empty cache of its own."""
    engine.forget()
    return engine.ask(*prompts, tokens=ANSWER_TOKENS, **asked)


def test_many_at_once_answer_twice_as_without_blendhub(model, prompts):
    """In the first run prompts are stored, and in the second loaded."""
    with Engine(model, variables=ONE_THREAD) as plain:
        expected = [answer.tokens for answer in answers(plain, prompts)]
        assert [answer.tokens for answer in answers(plain, prompts)] == expected, "vLLM itself answers otherwise"
    with Engine(model, SETTINGS | EXACT, variables=ONE_THREAD) as engine:
        stored = answers(engine, prompts)
        loaded = answers(engine, prompts)
    assert sum(answer.report["exact_tokens"] for answer in loaded) > 0.9 * sum(map(len, prompts))
    assert [answer.tokens for answer in stored] == expected
    assert [answer.tokens for answer in loaded] == expected
