"""The reader: a Qwen3 model, written for KV that was computed elsewhere.

The names of its parameters are those of ``Qwen3ForCausalLM``. Keys are kept unrotated: a key that is turned from one
place to another equals its unrotated self, rotated at the other.
"""

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from benchmarks.quality.reader import CHECKPOINT


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class Attention(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, self._width = config["hidden_size"], config["head_dim"]
        queries, keys = (config[f"num_{of}_heads"] * self._width for of in ("attention", "key_value"))
        self.q_proj = _linear(hidden, queries)
        self.k_proj = _linear(hidden, keys)
        self.v_proj = _linear(hidden, keys)
        self.o_proj = _linear(queries, hidden)
        self.q_norm = nn.RMSNorm(self._width, config["rms_norm_eps"])
        self.k_norm = nn.RMSNorm(self._width, config["rms_norm_eps"])

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, ``[batch, heads, tokens, width]``, not rotated."""
        shape = (*x.shape[:2], -1, self._width)
        q = self.q_norm(self.q_proj(x).view(shape)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2)
        return q, k, self.v_proj(x).view(shape).transpose(1, 2)


class MLP(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = _linear(hidden, inner)
        self.up_proj = _linear(hidden, inner)
        self.down_proj = _linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return projected


class Layer(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        self.self_attn, self.mlp = Attention(config), MLP(hidden, config["intermediate_size"])
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(hidden, eps), nn.RMSNorm(hidden, eps)

    def behind(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """What leaves the layer, from what entered it and what each head attended to."""
        batch, _, tokens, _ = attended.shape
        hidden = hidden + self.self_attn.o_proj(attended.transpose(1, 2).reshape(batch, tokens, -1))
        left: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return left


class Inner(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = nn.ModuleList(Layer(config) for _ in range(config["num_hidden_layers"]))
        self.norm = nn.RMSNorm(config["hidden_size"], config["rms_norm_eps"])


class Reader(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self._width, self._theta = config["head_dim"], config["rope_theta"]
        self.model = Inner(config)
        self.lm_head = _linear(config["hidden_size"], config["vocab_size"])

    @property
    def layers(self) -> list[Layer]:
        return list(self.model.layers)  # type: ignore[arg-type]

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, ``[batch, 1, tokens, width]``."""
        frequencies = self._theta ** -(torch.arange(0, self._width, 2).float() / self._width)
        angles = positions[:, None, :, None].float() * frequencies
        angles = torch.cat((angles, angles), -1)
        return angles.cos(), angles.sin()

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.model.norm(hidden))
        return logits


def load(folder: Path = CHECKPOINT) -> Reader:
    """A reader with the weights of a checkpoint."""
    reader = Reader(json.loads((folder / "config.json").read_text()))
    reader.load_state_dict({name: weight.float() for name, weight in load_file(folder / "model.safetensors").items()})
    return reader.eval()


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    cosines, sines = rotation
    one, two = x.chunk(2, -1)
    return x * cosines + torch.cat((-two, one), -1) * sines


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Causal without a mask. Queries and keys are rotated; each KV head serves a group of query heads."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
