"""The weights that training begins with: drawn at random, and a few heads that look at places, set by hand.

Without them a model of this size takes most of its training to find the words before a word.
"""

import torch
from torch import nn

from benchmarks.quality.reader.forward import READING
from benchmarks.quality.reader.model import CONSTANT, Attention, Reader, Sizes, frequencies

GAIN = 2.25
"""The gain of normed queries, for attention that can be sharp from the start."""


@torch.no_grad()
def begin(reader: Reader) -> None:
    """Draw the weights; torch's generator is seeded by the caller."""
    for name, parameter in reader.named_parameters():
        if parameter.dim() < 2:
            nn.init.constant_(parameter, GAIN if "q_norm" in name else 1.0)
        elif any(part in name for part in ("lm_head", "o_proj", "down_proj")):
            nn.init.zeros_(parameter)
        else:
            nn.init.normal_(parameter, std=0.5 if "embed" in name else parameter.shape[1] ** -0.5)
    reader.model.embed_tokens.weight[:, :CONSTANT] = 1.0
    sizes = reader.sizes
    for number, layer in enumerate(reader.layers):
        attention = layer.self_attn
        if number < 3:
            # The word before, and the one before that.
            _look(attention, sizes, 0, [(0, 1), (1, 2)], slice(0, 3))
            # The nearest of a kind, some words away.
            _look(attention, sizes, 1, [(2, 0), (3, 0)], slice(2, 7))
        elif number < 9:
            # The nearest of a kind, in this sentence or some documents away.
            _look(attention, sizes, 0, [(0, 0)], slice(3, 7))
            _look(attention, sizes, 0, [(1, 0)], slice(7, 11), keys=False)
        else:
            _match(attention)
        if number == READING:
            _copy(attention)


def _match(attention: Attention) -> None:
    """Let heads look for tokens that mean the same as their own: queries are projected as keys are."""
    heads, kv_heads = attention.sizes.heads, attention.sizes.kv_heads
    keys = attention.k_proj.weight.view(kv_heads, attention.sizes.width, -1)
    attention.q_proj.weight.copy_(keys.repeat_interleave(heads // kv_heads, 0).flatten(0, 1))


def _copy(attention: Attention) -> None:
    """Let heads write what they look at as it is there."""
    heads, kv_heads = attention.sizes.heads, attention.sizes.kv_heads
    values = attention.v_proj.weight.view(kv_heads, attention.sizes.width, -1)
    attention.o_proj.weight.copy_(values.repeat_interleave(heads // kv_heads, 0).flatten(0, 1).T)


def _look(
    attention: Attention, sizes: Sizes, kv_head: int, heads: list[tuple[int, int]], pairs: slice, keys: bool = True
) -> None:
    """Let heads look so many words back: queries and keys get a part that only their distance decides."""
    width, half = sizes.width, sizes.width // 2
    angles = frequencies(sizes)[pairs]
    scale = 1 / 14.7
    own = slice(kv_head * width, (kv_head + 1) * width)
    if keys:
        attention.k_proj.weight[own] *= 0.3
    part = torch.zeros(width)
    part[:half][pairs] = 1
    attention.k_proj.weight[own, :CONSTANT] += scale * part[:, None]
    for head, back in heads:
        own = slice(head * width, (head + 1) * width)
        attention.q_proj.weight[own] *= 0.3
        part = torch.zeros(width)
        part[:half][pairs] = torch.cos(back * angles)
        part[half:][pairs] = -torch.sin(back * angles)
        attention.q_proj.weight[own, :CONSTANT] += scale * part[:, None]
