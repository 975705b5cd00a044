"""What a selector sees of a prompt inside of vLLM decides which of its tokens are computed again."""

import pytest

from harness.engines import Engine
from tests.vllm.conftest import SETTINGS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def engine(model):
    with Engine(model, SETTINGS) as engine:
        yield engine


def test_the_places_that_the_question_asks_for_are_computed_again(engine, texts):
    document = texts.new(200)
    engine.one([*texts.new(11), *document, *texts.new(5)])
    engine.forget()
    for place in (60, 150):
        question = [*document[place : place + 2], *texts.new(3)]
        prompt = [*texts.new(100), *document, *question]
        answer = engine.one(prompt, recompute_ratio=0.15, store=False, explain=True)
        assert answer.report["spans"]["moved"] == [[100, 300]]
        # Of the budget of 30, a window of the question, eleven tokens, may be left.
        assert 20 <= answer.report["recomputed_tokens"] <= 30
        picked = {at for start, end in answer.report["spans"]["recomputed"] for at in range(start, end)}
        assert picked >= {*range(100, 104), *range(100 + place, 107 + place)}
