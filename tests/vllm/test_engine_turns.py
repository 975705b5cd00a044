"""First come, first served in a real engine, whose steps are shorter than its prompts."""

import pytest

from harness.engines import Engine, disagreement
from tests.vllm.arrangements import inside, wait_patiently
from tests.vllm.conftest import SETTINGS, TOLERANCE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.versions]


@pytest.mark.parametrize("in_advance", [True, False], ids=["steps planned in advance", "one step at a time"])
def test_a_later_prompt_of_many_steps_does_not_overtake_one_that_is_blended(in_advance, model, plain, texts):
    first, second = texts.new(400), texts.new(400)
    blended, long = [*texts.new(20), *second, *first, *texts.new(20)], texts.new(1900)
    with Engine(model, SETTINGS, max_num_batched_tokens=256, async_scheduling=in_advance) as engine:
        inside(engine, wait_patiently)
        for document in (first, second):
            engine.one(document)
        engine.forget()
        answers = engine.ask(blended, long, tokens=2, recompute_ratio=0.5, store=False)
        assert answers[0].report["moved_tokens"] == 800 and answers[0].report["recomputed_tokens"] > 256
        assert answers[0].ended_s < answers[1].first_token_s
        assert disagreement(answers[1:], plain.ask(long, tokens=2)) < TOLERANCE
        # An earlier one does not wait.
        engine.forget()
        answers = engine.ask(long, blended, tokens=2, recompute_ratio=0.5, store=False)
        assert answers[0].first_token_s < answers[1].first_token_s
