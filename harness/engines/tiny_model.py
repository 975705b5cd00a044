"""Small models with random weights, made on the spot: what demos, benchmarks and tests run. Qwen3, dense or of experts.

Needs torch and safetensors, which vLLM brings.
"""

import json
from pathlib import Path
from typing import Any

SHAPE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "torch_dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 1,
}


TIMED: dict[str, int] = {
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 1536,
}
"""The shape of the models of which benchmarks measure times."""


def make_config(path: Path, **changes: Any) -> Path:
    """A directory that vLLM loads as a model with dummy weights (``load_format="dummy"``)."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(SHAPE | changes))
    return path


def make_tiny_model(path: Path, seed: int = 0, **changes: Any) -> Path:
    """A directory that vLLM loads as a model; ``changes`` are to its ``config.json``. Made once, and then found again.

    Weights are so large that attention matters: a token's KV depends on the tokens before it.
    """
    config = SHAPE | changes
    written = path / "config.json"
    if written.exists() and json.loads(written.read_text()) == config | {"seed": seed}:
        return path
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, config["torch_dtype"])

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        made: torch.Tensor = torch.randn(rows, columns, generator=generator) * (gain / columns**0.5)
        return made.to(dtype)

    def ones(width: int, gain: float = 1.0) -> torch.Tensor:
        return torch.full((width,), gain, dtype=dtype)

    hidden, inner, width = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    weights = {
        "model.embed_tokens.weight": matrix(config["vocab_size"], hidden, hidden**0.5),
        "lm_head.weight": matrix(config["vocab_size"], hidden),
        "model.norm.weight": ones(hidden),
    }
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        weights |= {
            f"{layer}.input_layernorm.weight": ones(hidden),
            f"{layer}.post_attention_layernorm.weight": ones(hidden),
            f"{layer}.self_attn.q_proj.weight": matrix(queries, hidden),
            f"{layer}.self_attn.k_proj.weight": matrix(keys, hidden),
            f"{layer}.self_attn.v_proj.weight": matrix(keys, hidden, 2.0),
            f"{layer}.self_attn.o_proj.weight": matrix(hidden, queries, 2.0),
            # Sharp attention: averages over many tokens would hide where they stood.
            f"{layer}.self_attn.q_norm.weight": ones(width, 2.0),
            f"{layer}.self_attn.k_norm.weight": ones(width, 2.0),
        }
        experts = config.get("num_experts", 0)
        if experts:
            weights[f"{layer}.mlp.gate.weight"] = matrix(experts, hidden)
            inner = config["moe_intermediate_size"]
        for mlp in [f"{layer}.mlp.experts.{one}" for one in range(experts)] or [f"{layer}.mlp"]:
            weights |= {
                f"{mlp}.gate_proj.weight": matrix(inner, hidden),
                f"{mlp}.up_proj.weight": matrix(inner, hidden),
                f"{mlp}.down_proj.weight": matrix(hidden, inner),
            }
    path.mkdir(parents=True, exist_ok=True)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    written.write_text(json.dumps(config | {"seed": seed}, indent=1))
    return path
