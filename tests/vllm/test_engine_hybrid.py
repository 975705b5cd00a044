"""Models with attention windows under vLLM's hybrid allocator, which keeps few blocks of a layer with a window."""

import json
from pathlib import Path

import pytest

from harness.engines import Engine, disagreement
from tests.vllm.conftest import SETTINGS, TOLERANCE
from tests.vllm.test_engine_model_check import COMMON, GEMMA3

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WIDE = ["harness.engines.wide_weights:widen"]

GPT_OSS = COMMON | {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "sliding_window": 64,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    },
    "initial_context_length": 1024,
}


@pytest.fixture(params=[GEMMA3, GPT_OSS], ids=["gemma3", "gpt_oss"])
def start(request, tmp_path):
    """Starts an engine of a model; without settings plain vLLM."""
    path = Path(tmp_path)
    (path / "config.json").write_text(json.dumps(request.param))

    def started(settings=SETTINGS, **options):
        return Engine(path, settings, load_format="dummy", seed=7, arrange=WIDE, **options)

    return started


def test_exact_prefixes_longer_than_the_windows_equal_plain_vllm(start, texts):
    """In steps of 160 tokens: longer than a window, so that vLLM frees blocks in the middle of a prompt."""
    document = texts.new(700)
    prompts = [[*document, *texts.new(n)] for n in (9, 150, 33)]
    with start(None, max_num_batched_tokens=160) as plain:
        expected = plain.ask(*prompts, tokens=100)
        turn = [*prompts[1], *expected[1].tokens, *texts.new(9)]
        expected_turn = plain.one(turn, tokens=9)
    with start(max_num_batched_tokens=160) as engine:
        assert "exact prefixes are reused" in engine.log and "--disable-hybrid-kv-cache-manager" in engine.log
        engine.one(document)
        engine.forget()
        found = engine.ask(*prompts, tokens=100)
        assert [answer.report["exact_tokens"] for answer in found] == [700] * 3
        assert disagreement(found, expected) < TOLERANCE
        engine.forget()
        answered = engine.one(turn, tokens=9)
        # The answer is stored, too, although it is longer than a window.
        assert answered.report["exact_tokens"] >= len(prompts[1]) + 99
        assert disagreement([answered], [expected_turn]) < TOLERANCE
        assert not any(name.startswith(("saves_failed", "loads_failed")) for name in engine.call("counts"))


def test_a_load_that_fails_is_computed_by_vllm(start, texts):
    """vLLM cannot tell from blocks which request has failed: with several block tables it takes the request's name."""
    document = texts.new(300)
    prompts = [[*document, *texts.new(n)] for n in (9, 40)]
    with start() as engine:
        expected = engine.ask(*prompts, tokens=9, mode="off")
        engine.forget()
        engine.call("inside", "tests.vllm.failing_loads:fail_from_now_on")
        found = engine.ask(*prompts, tokens=9)
        assert engine.call("counts")["loads_failed"] == 2
        assert disagreement(found, expected) < TOLERANCE
