"""A model and a head of EAGLE for it that proposes what the model says: the model itself, one token behind.

What the head gets for a token is the embedding of the next one, so its layers, which are the model's, see the same text
from its second token on. A small share of the model's hidden states comes in, too: KV that was computed from other
states shows. Where the head's KV is missing or of other text, its proposals are others.
"""

from pathlib import Path
from typing import Any

from harness.engines.tiny_model import make_config
from tests.vllm.shapes import LLAMA

SHAPE: dict[str, Any] = LLAMA | {"num_hidden_layers": 2, "rope_scaling": None, "tie_word_embeddings": False}
HIDDEN_SHARE = 0.02


def make_model_and_head(path: Path, seed: int = 3) -> tuple[Path, Path]:
    """The directories of the model and of its head."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) / columns**0.5

    hidden, inner, width = SHAPE["hidden_size"], SHAPE["intermediate_size"], SHAPE["head_dim"]
    queries, keys = SHAPE["num_attention_heads"] * width, SHAPE["num_key_value_heads"] * width
    layers: dict[str, torch.Tensor] = {}
    for number in range(SHAPE["num_hidden_layers"]):
        layer = f"layers.{number}"
        layers |= {
            f"{layer}.input_layernorm.weight": torch.ones(hidden),
            f"{layer}.post_attention_layernorm.weight": torch.ones(hidden),
            f"{layer}.self_attn.q_proj.weight": matrix(queries, hidden),
            f"{layer}.self_attn.k_proj.weight": matrix(keys, hidden),
            f"{layer}.self_attn.v_proj.weight": matrix(keys, hidden),
            f"{layer}.self_attn.o_proj.weight": matrix(hidden, queries),
            f"{layer}.mlp.gate_proj.weight": matrix(inner, hidden),
            f"{layer}.mlp.up_proj.weight": matrix(inner, hidden),
            f"{layer}.mlp.down_proj.weight": matrix(hidden, inner),
        }
    # The head's first layer has no norm: embeddings have the size that the model's norm gives them.
    embeddings = torch.nn.functional.rms_norm(matrix(SHAPE["vocab_size"], hidden), (hidden,))
    model = {f"model.{name}": weight for name, weight in layers.items()} | {
        "model.embed_tokens.weight": embeddings,
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": matrix(SHAPE["vocab_size"], hidden),
    }
    del layers["layers.0.input_layernorm.weight"]
    head = layers | {"fc.weight": torch.cat([torch.eye(hidden), HIDDEN_SHARE * matrix(hidden, hidden)], 1)}
    for name, weights in (("model", model), ("head", head)):
        save_file(weights, make_config(path / name, **SHAPE) / "model.safetensors", metadata={"format": "pt"})
    return path / "model", path / "head"
