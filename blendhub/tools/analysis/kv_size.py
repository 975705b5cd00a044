"""How much KV a token of a model takes, by the model's config.json."""

from pathlib import Path
from typing import Any

import msgspec

USUAL = 128 * 1024
"""The size for an unnamed model: 32 layers, 8 KV heads of 128, keys and values, 2 bytes each."""

NUMBER = 2
"""The bytes of one number: vLLM computes in 16 bits, also with weights that are stored in 32."""


def kv_bytes_of(config: str | Path) -> int | None:
    """Bytes a token on all ranks together; None if the file does not say."""
    try:
        given = msgspec.json.decode(Path(config).read_bytes(), type=dict[str, Any])
        return _kv_bytes(given.get("text_config") or given)
    except (OSError, msgspec.DecodeError, KeyError, TypeError):
        return None


def _kv_bytes(config: dict[str, Any]) -> int:
    layers = int(config["num_hidden_layers"])
    if config.get("kv_lora_rank"):
        # A joint latent of keys and values, and the keys' rotary part.
        return layers * NUMBER * (int(config["kv_lora_rank"]) + int(config["qk_rope_head_dim"]))
    heads = int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    width = int(config.get("head_dim") or config["hidden_size"] // heads)
    return 2 * layers * kv_heads * width * NUMBER
