"""Blending beside what vLLM's scheduler does: its order, preemptions and speculation."""

import json
from typing import Any

import pytest

from harness.engines import Engine, disagreement
from harness.engines.shapes import LLAMA
from tests.vllm.arrangements import arrange, count_drafts, counted, inside, wait_patiently
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


@pytest.mark.versions
def test_preempted_requests_at_first_and_with_settled_blocks(model, plain, texts):
    """Few blocks for many answers: vLLM takes blocks away from requests, and computes them again."""
    shared = texts.new(300)
    prompts = [[*texts.new(20), *shared, *texts.new(20)] for _ in range(8)]
    with Engine(model, SETTINGS, num_gpu_blocks_override=60, max_model_len=1024) as engine:
        store(engine, [*shared, *texts.new(5)])
        rounds = [engine.ask(*prompts, tokens=100, recompute_ratio=1.0) for _ in range(2)]
        assert engine.call("preemptions") > 0
        assert any(answer.report["settled_tokens"] for answer in rounds[1])
        engine.forget()
    expected = plain.ask(*prompts, tokens=100)
    for answers in rounds:
        assert disagreement(answers, expected) < TOLERANCE


@pytest.mark.parametrize("method", ["draft_model", "eagle of another shape"])
def test_answers_behind_reused_text_are_those_without_speculation(model, plain, texts, tmp_path, method):
    """Reused positions have no KV of a draft model, so that fewer of its proposals are accepted behind them."""
    document, question = texts.new(330), texts.new(60)
    moved, goes_on = [*texts.new(130), *document, *question], [*document, *question[30:]]
    # The draft model is the model itself; the head has random weights, whose proposals are hardly ever accepted.
    speculation: dict[str, Any] = {"method": "draft_model", "num_speculative_tokens": 3, "model": str(model)}
    if method != "draft_model":
        facts = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "num_key_value_heads": 4}
        (tmp_path / "config.json").write_text(json.dumps(LLAMA | facts | {"rope_scaling": None}))
        head = {"method": "eagle", "model": str(tmp_path), "draft_load_config": {"load_format": "dummy"}}
        speculation |= head
    options: dict[str, Any] = {"async_scheduling": False, "speculative_config": speculation}
    with Engine(model, SETTINGS, arrange=arrange(count_drafts), **options) as engine:
        if method == "draft_model":
            engine.one(moved, tokens=24, mode="off", store=False)
            counts = inside(engine, counted)
            assert counts["accepted"] > 0.9 * counts["drafted"], "behind computed text it proposes what the model says"
            engine.forget()
        store(engine, document)
        blended = engine.one(moved, tokens=24, recompute_ratio=1.0, store=False)
        engine.forget()
        exact = engine.one(goes_on, tokens=24, store=False)
        assert inside(engine, counted)["drafted"] > 0
        engine.forget()
        repaired = engine.one(moved, tokens=60, recompute_ratio=0.0, repair="always", store=False)
        turn = [*moved, *repaired.tokens]
        again = engine.one(turn, tokens=4, mode="exact", store=False)
    assert repaired.report["repair"]["exact_from"] < 60 and again.report["engine_tokens"] >= len(turn) // 32 * 32 - 32
    assert disagreement([again], [plain.one(turn, tokens=4)]) < TOLERANCE
    assert blended.report["moved_tokens"] >= 256 and exact.report["exact_tokens"] >= 256
    assert disagreement([blended, exact], [plain.one(prompt, tokens=24) for prompt in (moved, goes_on)]) < TOLERANCE
