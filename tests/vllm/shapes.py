"""Small models of many architectures, whose weights vLLM makes up: the contents of their ``config.json``."""

from harness.engines.shapes import COMMON

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
GEMMA3N = GEMMA3 | {
    "architectures": ["Gemma3nForCausalLM"],
    "model_type": "gemma3n_text",
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": 1000,
    "hidden_size_per_layer_input": 32,
    "laurel_rank": 16,
    "activation_sparsity_pattern": [0.0] * 6,
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
BLOOM = COMMON | {"architectures": ["BloomForCausalLM"], "model_type": "bloom", "n_layer": 3, "n_head": 4}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "rope_scaling": None}
KIMI_LINEAR = COMMON | {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "mla_use_nope": True,
    "num_experts": None,
    "linear_attn_config": {
        "head_dim": 32,
        "num_heads": 4,
        "short_conv_kernel_size": 4,
        "kda_layers": [1, 2, 3],
        "full_attn_layers": [4],
    },
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
"""vLLM has no kernels for it on CPUs: see ``kimi_stand_ins``."""
