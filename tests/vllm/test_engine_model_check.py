"""Other models: what can be moved on each is found out when it starts."""

import json
from typing import Any

import pytest

from harness.engines import Engine, disagreement, largest_difference
from harness.engines.shapes import DEEPSEEK, GEMMA3, LFM2, LLAMA, MAMBA2, OPT
from harness.engines.tiny_model import make_tiny_model
from tests.vllm.arrangements import arrange, fail_builders, fail_loads, inside
from tests.vllm.conftest import NO_AMX, PROBING, SETTINGS, TOLERANCE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PLAIN: dict[str, Any] = {"compilation_config": {"custom_ops": ["none"]}}
"""vLLM's rotation for CPUs takes part of a longer vector (MLA) for a whole one; that in torch does not."""


@pytest.fixture
def start(tmp_path):
    def start(config, **options):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return Engine(tmp_path, SETTINGS | PROBING, load_format="dummy", **options)

    return start


@pytest.mark.parametrize(
    "config",
    [LLAMA, GEMMA3, pytest.param(DEEPSEEK, marks=NO_AMX)],
    ids=["stretched rotation", "two rotations and a window", "one vector for key and value"],
)
def test_a_model_whose_keys_turn_is_blended(config, start, texts):
    first, second = texts.new(300), texts.new(300)
    prompt = [*second, *texts.new(40), *first, *texts.new(9)]
    n = len(prompt) - 1
    # With the hybrid allocator, vLLM does not keep all the KV that is compared here: see test_engine_hybrid.py.
    with start(config, disable_hybrid_kv_cache_manager=True, **PLAIN) as engine:
        assert "text is reused anywhere" in engine.log
        engine.one([*first, *second])
        engine.forget()
        expected = engine.full_prefill(prompt)
        blended = engine.one(prompt, recompute_ratio=1.0, store=False)
        assert blended.report["moved_tokens"] == 600
        assert largest_difference(blended.kv(n), expected) < 1e-4
        engine.forget()
        probed = engine.one(prompt, recompute_ratio=0.5, store=False)
        assert probed.report["recomputed_tokens"] == 300


@pytest.mark.parametrize(
    "config, arranged, reason",
    [
        (OPT, [], "cannot be moved"),
        # No forward is needed to find out where the latent lies.
        pytest.param(
            DEEPSEEK, arrange(fail_builders), "builder failed: ValueError: there is one workspace only", marks=NO_AMX
        ),
    ],
    ids=["learned positions", "a backend that makes no metadata for BlendHub"],
)
def test_where_keys_cannot_be_moved_exact_prefixes_are_reused(config, arranged, reason, start, texts):
    document = texts.new(300)
    with start(config, arrange=arranged, **PLAIN) as engine:
        assert reason in engine.log and "exact prefixes are reused" in engine.log
        engine.one(document)
        engine.forget()
        expected = engine.full_prefill(document)
        exact = engine.one([*document, *texts.new(9)], store=False)
        assert exact.report["exact_tokens"] == 300
        assert largest_difference(exact.kv(299), expected) < 1e-5
        engine.forget()
        assert engine.one([*texts.new(40), *document, *texts.new(9)]).report["moved_tokens"] == 0


@pytest.mark.parametrize("shape, caches", [(LFM2, True), (MAMBA2, False)], ids=["lfm2 cached", "mamba2"])
def test_of_a_model_with_recurrent_layers_nothing_is_reused_and_one_line_says_why(shape, caches, start, texts):
    """Their state is that of a whole prefix."""
    prompts = [texts.new(n) for n in (200, 333)]
    wide = ["harness.engines.wide_weights:widen"]
    with start(shape, arrange=wide, enable_prefix_caching=caches) as engine:
        assert engine.log.count("keeps a recurrent state") == 1
        first = engine.ask(*prompts, tokens=9)
        engine.forget()
        again = engine.ask(*prompts, tokens=9)
        assert disagreement(again, first) < TOLERANCE
        assert all("served without reuse" in answer.report["reason"] for answer in again)
        assert engine.call("counts") == {"refused_model": 4}


def test_a_model_whose_every_layer_has_a_window_is_blended(tmp_path, texts):
    """vLLM takes away the blocks that the window has left, and lends others while tokens in the middle are computed."""
    windows = {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 0}
    model = make_tiny_model(tmp_path / "windows", layer_types=["sliding_attention"] * 4, **windows)
    first, second = texts.new(300), texts.new(300)
    moved = [*second, *texts.new(40), *first, *texts.new(9)]
    with Engine(model, SETTINGS, max_num_batched_tokens=128) as engine:
        assert "text is reused anywhere" in engine.log
        expected = engine.one([*first, *second], tokens=20)
        engine.forget()
        again = engine.one([*first, *second], tokens=20, store=False)
        assert again.report["exact_tokens"] == 599 and again.tokens == expected.tokens
        engine.forget()
        expected = engine.one(moved, tokens=20, mode="off", store=False)
        engine.forget()
        asked = engine.one(moved, tokens=20, recompute_ratio=1.0, store=False)
        assert asked.report["moved_tokens"] == 600 and asked.tokens == expected.tokens
        engine.forget()
        inside(engine, fail_loads, True)
        assert engine.one(moved, tokens=20, store=False).tokens == expected.tokens
        assert engine.call("counts")["loads_failed"] == 1
        engine.forget()
