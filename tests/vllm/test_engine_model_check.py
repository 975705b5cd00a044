"""Other models: what can be moved on each is found out when it starts."""

import json
from pathlib import Path

import pytest

from harness.engines import Engine, disagreement, largest_difference
from harness.engines.tiny_model import make_tiny_model
from tests.vllm.conftest import PROBING, SETTINGS, TOLERANCE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

COMMON = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "torch_dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
LLAMA = COMMON | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
}
GEMMA3 = COMMON | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "intermediate_size": 256,
    "num_hidden_layers": 6,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "sliding_window": 128,
    "sliding_window_pattern": 3,
    "query_pre_attn_scalar": 32,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
}
DEEPSEEK = COMMON | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "first_k_dense_replace": 3,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
}
LLAMA4 = LLAMA | {
    "architectures": ["Llama4ForCausalLM"],
    "model_type": "llama4_text",
    "intermediate_size_mlp": 256,
    "num_hidden_layers": 4,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 5,
    "attention_chunk_size": 64,
    "rope_scaling": None,
}
LFM2 = COMMON | {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "block_dim": 128,
    "block_ff_dim": 256,
    "block_multiple_of": 32,
    "block_auto_adjust_ff_dim": False,
    "conv_dim": 128,
    "conv_dim_out": 128,
    "conv_L_cache": 3,
    "conv_bias": False,
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    "num_key_value_heads": 2,
    "norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
OPT = COMMON | {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "ffn_dim": 256,
    "num_hidden_layers": 2,
    "word_embed_proj_dim": 128,
    "do_layer_norm_before": True,
    "activation_function": "relu",
    "pad_token_id": 1,
}


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
    # With the hybrid allocator only exact prefixes are reused of a model with windows: see test_engine_hybrid.py.
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


def test_a_model_whose_every_layer_has_a_window_reuses_exact_prefixes_only(tmp_path, texts):
    """vLLM takes away the blocks that the window has left, so that tokens in the middle cannot be computed again."""
    windows = {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 0}
    model = make_tiny_model(tmp_path / "windows", layer_types=["sliding_attention"] * 4, **windows)
    first, second = texts.new(300), texts.new(300)
    moved = [*second, *texts.new(40), *first, *texts.new(9)]
    with Engine(model, SETTINGS, max_num_batched_tokens=128) as engine:
        assert "exact prefixes are reused" in engine.log and "an attention window" in engine.log
        expected = engine.one([*first, *second], tokens=20)
        engine.forget()
        again = engine.one([*first, *second], tokens=20, store=False)
        assert again.report["exact_tokens"] == 599 and again.tokens == expected.tokens
        engine.forget()
        expected = engine.one(moved, tokens=20, mode="off", store=False)
        engine.forget()
        asked = engine.one(moved, tokens=20, recompute_ratio=1.0, store=False)
        assert asked.report["moved_tokens"] == 0 and asked.tokens == expected.tokens


def test_a_model_with_recurrent_layers_is_served_without_reuse_and_says_so(start, texts):
    """vLLM refused to start it: only connectors that declare support for its hybrid allocator may serve such models."""
    prompts = [texts.new(n) for n in (200, 333)]
    with start(LFM2) as engine:
        assert "recurrent or linear attention layers are served without reuse" in engine.log
        first = engine.ask(*prompts, tokens=9)
        engine.forget()
        again = engine.ask(*prompts, tokens=9)
        assert disagreement(again, first) < TOLERANCE
        assert all("served without reuse" in answer.report["reason"] for answer in again)
        assert engine.call("counts") == {"refused_model": 4}
