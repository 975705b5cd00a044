"""RecomputeSet tokens that attend by the device: what is computed is what the engine's own attention would compute."""

import json
from typing import Any

import pytest

from harness.engines import Engine, largest_difference
from harness.engines.shapes import BLOOM, DEEPSEEK, GEMMA3, GEMMA3N, LLAMA4
from tests.vllm.arrangements import arrange, attend_on_device, attend_short_spans_on_device
from tests.vllm.conftest import ATTENDED, NO_AMX, PROBING, SETTINGS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

BY_TORCH: dict[str, Any] = {"arrange": arrange(attend_on_device)}
KINDS = {
    "eager": {},
    "compiled": {"enforce_eager": False},
    "short spans only": {"arrange": arrange(attend_short_spans_on_device)},
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
    half = engine.one(prompt, recompute_ratio=0.5, store=False)
    assert half.report["recomputed_tokens"] == n


@pytest.mark.parametrize("options", [pytest.param(options, id=name) for name, options in KINDS.items()])
def test_everything_recomputed_equals_full_prefill(options, model, texts):
    with Engine(model, SETTINGS | PROBING, **BY_TORCH | options) as engine:
        check(engine, texts, 150)


@pytest.fixture
def start(tmp_path):
    """Starts an engine with a selector that asks, which needs the same layers."""

    def start(config):
        (tmp_path / "config.json").write_text(json.dumps(config))
        options: dict[str, Any] = {"compilation_config": {"custom_ops": ["none"]}, **BY_TORCH}
        settings = SETTINGS | ATTENDED
        return Engine(tmp_path, settings, load_format="dummy", disable_hybrid_kv_cache_manager=True, **options)

    return start


@pytest.mark.parametrize(
    "config",
    [GEMMA3, LLAMA4, pytest.param(DEEPSEEK, marks=NO_AMX)],
    ids=["two rotations and a window", "chunks", "one vector for key and value"],
)
def test_models_with_other_attention(config, start, texts):
    with start(config) as engine:
        check(engine, texts, 150, 1e-4)


@pytest.mark.parametrize("config, reason", REFUSED.values(), ids=REFUSED)
def test_the_engine_attends_where_the_device_cannot(config, reason, start, texts):
    with start(config) as engine:
        assert reason in engine.log, engine.log[-3000:]
        check(engine, texts, 150, 1e-4, "chosen tokens attend by the engine's attention, not by the device: ")
