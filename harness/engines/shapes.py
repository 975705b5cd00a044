"""What is common to small models whose weights vLLM makes up, and one of them: the contents of ``config.json``."""

COMMON = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "torch_dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
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
