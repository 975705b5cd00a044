"""LoRA adapters of the tiny model."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from harness.engines.tiny_model import SHAPE


def make_adapter(path: Path, seed: int) -> Path:
    """A LoRA adapter as PEFT writes it, in place of the one that is there."""
    path.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    hidden, queries = SHAPE["hidden_size"], SHAPE["num_attention_heads"] * SHAPE["head_dim"]
    weights = {}
    for layer in range(SHAPE["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        weights[f"{name}.lora_A.weight"] = torch.randn(8, hidden, generator=generator)
        weights[f"{name}.lora_B.weight"] = torch.randn(queries, 8, generator=generator)
    save_file(weights, path / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 8, "lora_alpha": 8, "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps(about | {"target_modules": ["q_proj"]}))
    return path
