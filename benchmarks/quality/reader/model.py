"""The reader: a Qwen3 model, written for training, and for KV that was computed elsewhere.

The names of its parameters are those of ``Qwen3ForCausalLM``. Keys are kept unrotated: a key that is turned from one
place to another equals its unrotated self, rotated at the other.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.quality.reader import words as w


@dataclass(frozen=True)
class Sizes:
    vocabulary: int = 288
    hidden: int = 128
    layers: int = 12
    heads: int = 4
    kv_heads: int = 2
    width: int = 32
    inner: int = 192
    theta: float = 100_000.0


EPS = 1e-6
CONSTANT = 8
"""So many dimensions of every embedding are 1, for heads that look at places and not at words."""


class Linear(nn.Linear):
    """Computes in the precision of its input; no bias."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class Normed(torch.autograd.Function):
    """Rows with a root mean square of 1; one pass over memory where composed operations make several."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        scale = (torch.linalg.vecdot(x, x) / x.shape[-1] + EPS).rsqrt_()[..., None]
        y = x * scale
        context.save_for_backward(y, scale)
        return y

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        y, scale = context.saved_tensors
        along = torch.linalg.vecdot(gradient, y)[..., None].div_(-y.shape[-1])
        return torch.addcmul(gradient, y, along).mul_(scale)


class Norm(nn.Module):
    """RMSNorm; most of its gains stay 1, which saves a pass: the weights behind them can be larger."""

    def __init__(self, width: int, learns: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width), requires_grad=learns)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Normed.apply(x)
        return y * self.weight if self.weight.requires_grad else y


class Attention(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        queries, keys = sizes.heads * sizes.width, sizes.kv_heads * sizes.width
        self.q_proj = Linear(sizes.hidden, queries)
        self.k_proj = Linear(sizes.hidden, keys)
        self.v_proj = Linear(sizes.hidden, keys)
        self.o_proj = Linear(queries, sizes.hidden)
        self.q_norm = Norm(sizes.width, learns=True)
        self.k_norm = Norm(sizes.width)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, ``[batch, heads, tokens, width]``, not rotated, in full precision."""
        shape = (*x.shape[:2], -1, self.sizes.width)
        q = self.q_norm(self.q_proj(x).view(shape).float()).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(shape).float()).transpose(1, 2)
        return q, k, self.v_proj(x).view(shape).float().transpose(1, 2)


class MLP(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate_proj = Linear(sizes.hidden, sizes.inner)
        self.up_proj = Linear(sizes.hidden, sizes.inner)
        self.down_proj = Linear(sizes.inner, sizes.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(sizes), MLP(sizes)
        self.input_layernorm = Norm(sizes.hidden)
        self.post_attention_layernorm = Norm(sizes.hidden)

    def behind(self, hidden: Tensor, attended: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """What leaves the layer, from what entered it and what each head attended to."""
        batch, _, tokens, _ = attended.shape
        hidden = hidden + self.self_attn.o_proj(attended.transpose(1, 2).reshape(batch, tokens, -1).to(dtype))
        return hidden + self.mlp(self.post_attention_layernorm(hidden).to(dtype))


class Inner(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.norm = Norm(sizes.hidden)


class Reader(nn.Module):
    def __init__(self, sizes: Sizes = Sizes()) -> None:
        super().__init__()
        assert sizes.vocabulary >= len(w.WORDS)
        self.sizes = sizes
        self.model = Inner(sizes)
        self.lm_head = Linear(sizes.hidden, sizes.vocabulary)

    @property
    def layers(self) -> list[Layer]:
        return list(self.model.layers)  # type: ignore[arg-type]

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, ``[batch, 1, tokens, width]``."""
        angles = positions[:, None, :, None].float() * frequencies(self.sizes)
        angles = torch.cat((angles, angles), -1)
        return angles.cos(), angles.sin()

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(self.model.norm(hidden))


def frequencies(sizes: Sizes) -> Tensor:
    return sizes.theta ** -(torch.arange(0, sizes.width, 2).float() / sizes.width)


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    cosines, sines = rotation
    one, two = x.chunk(2, -1)
    return x * cosines + torch.cat((-two, one), -1) * sines


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Causal without a mask. Queries and keys are rotated; each KV head serves a group of query heads."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
