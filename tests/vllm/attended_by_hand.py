"""What the end of a prompt attends to in a small Qwen3, computed apart from vLLM, and by the probe of an engine."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from blendhub import Span
from blendhub.vllm.model.attention_probe import AttentionQuery
from blendhub.vllm.model.recompute_set import RecomputeSet, RequestTokens, positions_of


def probed(tokens: list[int], spans: list[Span], stored: list[Span]) -> list[float]:
    """Inside an engine: the KV of the whole prompt is in its pages, and some of its tokens ask."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector: Any = get_kv_transfer_group()
    context = connector._worker._context
    blocks = np.arange(1, 2 + len(tokens) // context.model.block_size)[::-1].copy()
    part = RequestTokens(np.array(tokens, np.uint32), [blocks], [Span(0, len(tokens))])
    context.model.forward(RecomputeSet([part]))
    asking = AttentionQuery(part._replace(spans=spans), stored)
    with torch.inference_mode():
        # Beside another prompt, whose numbers are not its own.
        other = AttentionQuery(part._replace(spans=[Span(9, 13)]), [Span(0, 9)])
        received: list[float] = context.attention.received([other, asking])[1].tolist()
    return received


def computed(model: Path, tokens: list[int], asking: list[Span], stored: list[Span], layers: set[int]) -> torch.Tensor:
    """Full prefill, then once more for those that ask, which do not see what is left out."""
    whole = np.arange(len(tokens))
    kv = _forward(model, tokens, whole, None, set())[1]
    there = np.zeros(len(tokens), bool)
    there[positions_of(stored)] = True
    return _forward(model, tokens, positions_of(asking), (kv, there), layers)[0]


def _forward(model: Path, tokens: list[int], at: Any, known: Any, layers: set[int]) -> Any:
    config, weights = json.loads((model / "config.json").read_text()), load_file(model / "model.safetensors")
    width, eps, n = config["head_dim"], config["rms_norm_eps"], len(tokens)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    frequencies = config["rope_theta"] ** -(torch.arange(0, width, 2) / width)
    angles = torch.from_numpy(at)[:, None] * frequencies
    cos, sin = (torch.cat([part, part], -1)[:, None] for part in (angles.cos(), angles.sin()))

    def norm(states: torch.Tensor, name: str) -> torch.Tensor:
        return states * torch.rsqrt(states.square().mean(-1, keepdim=True) + eps) * weights[name]

    def rotary(states: torch.Tensor) -> torch.Tensor:
        first, second = states.chunk(2, -1)
        return states * cos + torch.cat([-second, first], -1) * sin

    hidden = weights["model.embed_tokens.weight"][torch.tensor(tokens)[at]]
    seen = torch.arange(n) <= torch.from_numpy(at)[:, None]
    if known:
        known[1][at] = True
        seen &= torch.from_numpy(known[1])
    received, kept = torch.zeros(n), []
    for number in range(config["num_hidden_layers"]):
        name = f"model.layers.{number}"
        states = norm(hidden, f"{name}.input_layernorm.weight")

        def head(which: str, count: int, states: torch.Tensor = states, name: str = name) -> torch.Tensor:
            return (states @ weights[f"{name}.self_attn.{which}_proj.weight"].T).view(-1, count, width)

        queries = rotary(norm(head("q", heads), f"{name}.self_attn.q_norm.weight"))
        keys, values = known[0][number] if known else (torch.zeros(n, kv_heads, width) for _ in range(2))
        keys[at], values[at] = rotary(norm(head("k", kv_heads), f"{name}.self_attn.k_norm.weight")), head("v", kv_heads)
        kept.append((keys, values))
        keys, values = (one.repeat_interleave(heads // kv_heads, 1) for one in (keys, values))
        products = torch.einsum("qhw,khw->hqk", queries, keys) / width**0.5
        attention = products.masked_fill(~seen, -torch.inf).softmax(-1)
        if number in layers:
            received += attention.sum((0, 1))
        taken = torch.einsum("hqk,khw->qhw", attention, values).reshape(len(at), -1)
        hidden = hidden + taken @ weights[f"{name}.self_attn.o_proj.weight"].T
        states = norm(hidden, f"{name}.post_attention_layernorm.weight")
        gate, up = (states @ weights[f"{name}.mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        hidden = hidden + (torch.nn.functional.silu(gate) * up) @ weights[f"{name}.mlp.down_proj.weight"].T
    return received, kept
