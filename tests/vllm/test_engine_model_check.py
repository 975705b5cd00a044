"""Other models: what can be moved on each is found out when it starts."""

import json
from pathlib import Path

import pytest

from harness.engines import Engine, largest_difference
from harness.engines.shapes import DEEPSEEK, GEMMA3, LLAMA, OPT
from harness.engines.tiny_model import make_tiny_model
from tests.vllm.conftest import PROBING, SETTINGS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def start(tmp_path):
    def start(config, **options):
        (tmp_path / "config.json").write_text(json.dumps(config))
        # vLLM's rotation for CPUs takes part of a longer vector (MLA) for a whole one; that in torch does not.
        plain = {"custom_ops": ["none"]}
        return Engine(tmp_path, SETTINGS | PROBING, load_format="dummy", compilation_config=plain, **options)

    return start


NO_AMX = pytest.mark.skipif(
    "amx_tile" in Path("/proc/cpuinfo").read_text(),
    reason="vLLM's kernels for processors with AMX refuse this model in float32: 'expect weight to be bfloat16'",
)


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
    with start(config, disable_hybrid_kv_cache_manager=True) as engine:
        engine.one([*first, *second])
        engine.forget()
        expected = engine.full_prefill(prompt)
        blended = engine.one(prompt, recompute_ratio=1.0, store=False)
        assert blended.report["moved_tokens"] == 600
        assert largest_difference(blended.kv(n), expected) < 1e-4
        engine.forget()
        probed = engine.one(prompt, recompute_ratio=0.5, store=False)
        assert probed.report["recomputed_tokens"] == 300
        assert "text is reused anywhere" in engine.log


def test_a_model_that_learned_its_positions_reuses_exact_prefixes_only(start, texts):
    document = texts.new(300)
    with start(OPT) as engine:
        assert "cannot be moved" in engine.log and "exact prefixes are reused" in engine.log
        engine.one(document)
        engine.forget()
        assert engine.one([*document, *texts.new(9)]).report["exact_tokens"] == 300
        engine.forget()
        assert engine.one([*texts.new(40), *document, *texts.new(9)]).report["moved_tokens"] == 0


@NO_AMX
def test_a_backend_that_makes_no_metadata_for_blendhub_reuses_exact_prefixes_only(start, texts):
    """No forward is needed to find out where the latent lies."""
    document = texts.new(300)
    with start(DEEPSEEK, arrange=["tests.vllm.failing_builders:fail"]) as engine:
        assert "builder failed: ValueError: there is one workspace only; exact prefixes are reused" in engine.log
        engine.one(document)
        engine.forget()
        expected = engine.full_prefill(document)
        exact = engine.one([*document, *texts.new(9)], store=False)
        assert exact.report["exact_tokens"] == 300
        assert largest_difference(exact.kv(299), expected) < 1e-5


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
        engine.call("inside", "tests.vllm.failing_loads:fail_from_now_on")
        assert engine.one(moved, tokens=20, store=False).tokens == expected.tokens
        assert engine.call("counts")["loads_failed"] == 1
        engine.forget()
