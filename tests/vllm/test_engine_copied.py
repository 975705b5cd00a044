"""Donors that real vLLM still has in its own cache: they are copied from its blocks, and not from the arena."""

import pytest

from harness.engines import Engine, disagreement
from harness.engines.shapes import GPT_OSS
from tests.vllm.arrangements import fail_loads, inside, spoil_arena
from tests.vllm.conftest import SETTINGS, TOLERANCE, MovingPrompt, drawn, from_the_arena, moved

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def engine(model):
    with Engine(model, SETTINGS) as engine:
        yield engine


def test_a_prompt_whose_donors_vllm_has_reads_nothing_of_the_arena(engine, texts):
    prompts = MovingPrompt(texts)
    expected = from_the_arena(engine, prompts)
    engine.one(prompts.before)  # what is loaded exactly is in vLLM's cache again
    inside(engine, spoil_arena)
    answer = moved(engine, prompts)
    assert answer.report["copied_tokens"] == answer.report["moved_tokens"] >= 500
    assert (prompts.kv(answer) == expected).all()
    engine.forget()
    answer = moved(engine, prompts)
    assert answer.report["copied_tokens"] == 0 and not (prompts.kv(answer) == expected).all(), "nothing was spoilt"
    engine.forget()


def test_when_a_copy_fails_vllm_computes_the_prompt_and_has_all_blocks_again(engine, plain, texts):
    prompts = MovingPrompt(texts)
    engine.one(prompts.before)
    inside(engine, fail_loads, True)
    answer = engine.one(prompts.moving, tokens=6, store=False)
    inside(engine, fail_loads, False)
    assert answer.report["copied_tokens"] == answer.report["moved_tokens"] == 0
    assert "the accelerator is lost" in answer.report["reason"]
    assert disagreement([answer], [plain.one(prompts.moving, tokens=6)]) < TOLERANCE
    engine.forget()
    engine.one(prompts.before)
    copied = [moved(engine, prompts).report["copied_tokens"] for _ in range(2)]
    assert copied[0] >= 500 and copied[1] == 0, "vLLM has the second one's own prefix"
    for seconds in (0.0, 0.01, 0.05):
        engine.ask(*[[*texts.new(9), *prompts.moving]] * 4, abort_after=seconds, recompute_ratio=0.5, store=False)
    engine.forget()


def test_layers_with_a_window_read_the_arena_where_vllm_keeps_the_others_blocks_only(texts, tmp_path):
    prompts = MovingPrompt(texts)
    with Engine(drawn(tmp_path, GPT_OSS), SETTINGS, load_format="dummy", async_scheduling=False) as engine:
        expected = from_the_arena(engine, prompts)
        engine.one(prompts.before)
        answer = moved(engine, prompts)
        assert 0 < answer.report["copied_tokens"] < answer.report["moved_tokens"]
        assert (prompts.kv(answer) == expected).all()
        engine.forget()
