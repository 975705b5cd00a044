"""Repair: behind blended KV an answer begins, and goes on from exact KV."""

import pytest

from harness.engines import Engine, disagreement, largest_difference
from tests.vllm.conftest import ROUNDING, SETTINGS, TOLERANCE, store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

REPAIRED = {"repair": "always", "repair_share": 20.0}
"""Within a few steps, whatever else the machine does."""
TOKENS = 40


@pytest.fixture(scope="module")
def engine(model):
    with Engine(model, SETTINGS | REPAIRED) as engine:
        yield engine


def blended_prompt(engine, texts) -> list[int]:
    """A prompt that moves two documents, which are stored."""
    first, second = texts.new(250), texts.new(250)
    store(engine, [*first, *second])
    return [*texts.new(40), *second, *texts.new(20), *first, *texts.new(30)]


def test_an_answer_goes_on_from_exact_kv_and_so_does_the_next_turn(engine, plain, texts):
    prompt = blended_prompt(engine, texts)
    answer = engine.one(prompt, TOKENS, explain=True)
    print(answer.report)
    n = len(prompt) + TOKENS - 1
    said = [*prompt, *answer.tokens]
    expected = plain.one(said)
    assert largest_difference(answer.kv(n), expected.kv(n)) < ROUNDING
    turn = [*said, *texts.new(30)]
    second = engine.one(turn, 4)
    print(second.report)
    assert disagreement([second], [plain.one(turn, 4)]) < TOLERANCE
    assert second.report["engine_tokens"] > len(prompt) // 32 * 32
    print(engine.call("counts"))
