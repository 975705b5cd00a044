"""What a selector sees of a prompt inside of vLLM decides which of its tokens are computed again."""

import pytest

from engine_harness import Engine, disagreement
from tests.vllm.conftest import SETTINGS, TOLERANCE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def engine(model):
    with Engine(model, SETTINGS | {"selector": {"name": "combined"}}) as engine:
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
        assert 22 <= answer.report["recomputed_tokens"] <= 30
        picked = {at for start, end in answer.report["spans"]["recomputed"] for at in range(start, end)}
        assert picked >= {*range(100, 104), *range(100 + place, 108 + place)}


def test_everything_recomputed_equals_full_prefill(engine, plain, texts):
    first, second = texts.new(300), texts.new(150)
    engine.one([*first, *second])
    engine.forget()
    prompt = [*second, *texts.new(37), *first, *texts.new(20)]
    blended = engine.one(prompt, recompute_ratio=1.0, store=False)
    assert blended.report["moved_tokens"] == blended.report["recomputed_tokens"] == 450
    assert disagreement([blended], [plain.one(prompt)]) < TOLERANCE
