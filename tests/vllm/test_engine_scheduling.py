"""Blending beside what vLLM's scheduler does: its order. ``test_engine_preempted`` has preemptions."""

import pytest

from harness.engines import Engine, disagreement
from tests.vllm.arrangements import inside, wait_patiently
from tests.vllm.conftest import SETTINGS, TOLERANCE, store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.versions
def test_first_come_first_served_with_steps_that_are_shorter_than_prompts(model, plain, texts):
    first, second = texts.new(400), texts.new(400)
    blended, long = [*texts.new(20), *second, *first, *texts.new(20)], texts.new(1900)
    with Engine(model, SETTINGS, max_num_batched_tokens=256) as engine:
        inside(engine, wait_patiently)
        store(engine, first, second)
        answers = engine.ask(blended, long, tokens=2, recompute_ratio=0.5, store=False)
        assert answers[0].report["moved_tokens"] == 800 and answers[0].report["recomputed_tokens"] > 256
        assert answers[0].ended_s < answers[1].first_token_s, "the later prompt has overtaken the one that is blended"
        assert disagreement(answers[1:], plain.ask(long, tokens=2)) < TOLERANCE
        engine.forget()
        answers = engine.ask(long, blended, tokens=2, recompute_ratio=0.5, store=False)
        assert answers[0].first_token_s < answers[1].first_token_s
