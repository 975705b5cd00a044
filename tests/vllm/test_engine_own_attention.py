"""RecomputeSet tokens that attend by the device: what is computed is what the engine's own attention would compute."""

import json
from typing import Any

import pytest

from harness.engines import Engine, largest_difference
from harness.engines.shapes import BLOOM, DEEPSEEK, GEMMA3, GEMMA3N, LLAMA4
from harness.engines.tiny_model import make_tiny_model
from tests.vllm.conftest import ATTENDED, ON_THE_SECOND_RUNNER, PROBING, SETTINGS
from tests.vllm.test_engine_model_check import NO_AMX

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

BY_TORCH: dict[str, Any] = {"arrange": ["tests.vllm.own_attention:arrange"]}
KINDS = {
    "eager": {},
    "compiled": {"enforce_eager": False},
    "second runner": ON_THE_SECOND_RUNNER,
    "short spans only": {"arrange": ["tests.vllm.own_attention:arrange_for_short_spans"]},
}


REFUSED = {
    "ALiBi": (BLOOM, "0.self_attention.attn has ALiBi"),
    "the KV of another layer": (GEMMA3N, ".self_attn.attn reads the KV of"),  # vLLM lists the layers in any order
}


def check(engine, texts, n, rounding=1e-5, said="chosen tokens attend by the device"):
    assert said in engine.log, engine.log[-3000:]
    assert "text is reused anywhere" in engine.log, engine.log[-3000:]
    first, second = texts.new(n), texts.new(n)
    engine.one([*first, *second])
    engine.forget()
    prompt = [*second, *texts.new(5), *first, *texts.new(9)]
    expected = engine.full_prefill(prompt)
    blended = engine.one(prompt, recompute_ratio=1.0, store=False)
    assert blended.report["moved_tokens"] == blended.report["recomputed_tokens"] == 2 * n
    assert largest_difference(blended.kv(len(prompt) - 1), expected) < rounding
    engine.forget()
    # What is asked or probed before something is picked goes through layers of our own, too.
    some = engine.one(prompt, recompute_ratio=0.5, store=False)
    assert some.report["recomputed_tokens"] == n


@pytest.mark.parametrize("options", [pytest.param(one, id=name) for name, one in KINDS.items()])
def test_everything_recomputed_equals_full_prefill(options, model, texts):
    with Engine(model, SETTINGS | PROBING, **BY_TORCH | options) as engine:
        check(engine, texts, 150)


@pytest.mark.parametrize(
    "config",
    [GEMMA3, LLAMA4, pytest.param(DEEPSEEK, marks=NO_AMX)],
    ids=["two rotations and a window", "chunks", "one vector for key and value"],
)
def test_models_with_other_attention(config, tmp_path, texts):
    """And with a selector that asks, which needs the same layers."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    plain = {"custom_ops": ["none"]}
    options = {"compilation_config": plain, "disable_hybrid_kv_cache_manager": True, **BY_TORCH}
    with Engine(tmp_path, SETTINGS | ATTENDED, load_format="dummy", **options) as engine:
        check(engine, texts, 150, 1e-4)


@pytest.mark.parametrize("config, reason", REFUSED.values(), ids=REFUSED)
def test_the_engine_attends_where_the_device_cannot(config, reason, tmp_path, texts):
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = {"compilation_config": {"custom_ops": ["none"]}, "disable_hybrid_kv_cache_manager": True, **BY_TORCH}
    with Engine(tmp_path, SETTINGS | ATTENDED, load_format="dummy", **options) as engine:
        assert reason in engine.log, engine.log[-3000:]
        check(engine, texts, 150, 1e-4, "chosen tokens attend by the engine's attention, not by the device: ")


def test_the_kernel_serves_an_engine(tmp_path, texts):
    model = make_tiny_model(tmp_path / "two_layers", num_hidden_layers=2)
    few: dict[str, Any] = {"num_gpu_blocks_override": 24, "max_model_len": 256, "max_num_batched_tokens": 256}
    arrange = ["tests.vllm.own_attention:arrange", "kernel", "TRITON_ATTN", "1", ""]
    settings = SETTINGS | PROBING | {"chunk_tokens": 32}
    with Engine(model, settings, arrange=arrange, **ON_THE_SECOND_RUNNER, **few) as engine:
        check(engine, texts, 70)
