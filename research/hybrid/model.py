"""A small hybrid model: gated-delta layers that keep a state, and attention layers that keep keys, as in Qwen3-Next.

It computes *pieces* of a prompt. A piece is computed tokens, and behind them, perhaps, tokens that are not computed: of
these, each layer has what was stored of them elsewhere.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, HEAD, HIDDEN = 160, 5, 32, 320
KINDS = "ddda" * 2
"""One letter a layer: gated (d)elta or (a)ttention."""
TAPS = 4
"""The width of the short convolution."""
CHUNK = 32


class Map(NamedTuple):
    """What tokens do to a recurrent layer: the state behind them is ``a @ state + b``, whatever stood before."""

    a: Tensor
    b: Tensor
    tail: Tensor
    """The last inputs of the convolution, which the next tokens need."""

    def then(self, other: "Map") -> "Map":
        return Map(other.a @ self.a, other.a @ self.b + other.b, other.tail)


class KV(NamedTuple):
    keys: Tensor
    """Not yet turned to positions: moved keys are turned to their new ones."""
    values: Tensor

    def then(self, other: "KV") -> "KV":
        return KV(torch.cat([self.keys, other.keys], 2), torch.cat([self.values, other.values], 2))


Stored: TypeAlias = Sequence[Map | KV]


class Piece(NamedTuple):
    tokens: Tensor
    """``[batch, tokens]``: these are computed."""
    behind: Stored | None = None
    """By layer: what is known of the tokens behind them."""


class Inputs(NamedTuple):
    """What a gated-delta layer makes of its tokens, ``[batch, heads, tokens, ...]``."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    """The logarithm of alpha."""
    beta: Tensor

    def then(self, other: "Inputs") -> "Inputs":
        return Inputs(*(torch.cat(each, 2) for each in zip(self, other, strict=True)))

    def behind(self, n: int) -> "Inputs":
        return Inputs(*(each[:, :, n:] for each in self))


def gated_delta(x: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and the state behind these tokens: ``S = alpha (I - beta k k^T) S + beta k v^T``, ``o = S^T q``.

    In chunks: within one, the triangular system of the WY representation gives what each token writes.
    """
    length = x.q.shape[2]
    pad = -length % CHUNK
    q, k, v = (F.pad(each, (0, 0, 0, pad)).unflatten(2, (-1, CHUNK)) for each in (x.q, x.k, x.v))
    decay, beta = (F.pad(each, (0, pad)).unflatten(2, (-1, CHUNK)) for each in (x.decay, x.beta))
    total = decay.cumsum(-1)
    causal = torch.ones(CHUNK, CHUNK, dtype=torch.bool).tril()
    between = (total[..., :, None] - total[..., None, :]).masked_fill(~causal, -torch.inf).exp()
    by_beta = beta[..., None]
    mixing = (by_beta * (k @ k.mT) * between).tril(-1)
    right = torch.cat([by_beta * v, by_beta * total.exp()[..., None] * k], -1)
    written = torch.linalg.solve_triangular(mixing, right, upper=False, unitriangular=True)
    own, from_state = written.split([v.shape[-1], k.shape[-1]], -1)
    seen = (q @ k.mT) * between
    q = q * total.exp()[..., None]
    k = k * (total[..., -1:] - total).exp()[..., None]
    kept = total[..., -1].exp()[..., None, None]
    outputs = []
    for n in range(q.shape[2]):
        new = own[:, :, n] - from_state[:, :, n] @ state
        outputs.append(q[:, :, n] @ state + seen[:, :, n] @ new)
        state = kept[:, :, n] * state + k[:, :, n].mT @ new
    return torch.cat(outputs, 2)[:, :, :length], state


def map_of(x: Inputs, tail: Tensor) -> Map:
    """``b`` is what the rule makes of these tokens from a state of 0, ``a`` what it makes of values of 0 from I."""
    eye = torch.eye(x.k.shape[-1]).expand(*x.k.shape[:2], -1, -1)
    nothing = torch.zeros_like(eye[..., : x.v.shape[-1]])
    _, both = gated_delta(x._replace(v=torch.cat([x.v, torch.zeros_like(x.k)], -1)), torch.cat([nothing, eye], -1))
    b, a = both.split([x.v.shape[-1], x.k.shape[-1]], -1)
    return Map(a, b, tail)


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, HEAD)).transpose(1, 2)


class GatedDelta(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.conv = nn.Parameter(torch.randn(3 * WIDTH, 1, TAPS) / TAPS)
        self.gates = nn.Linear(WIDTH, 2 * HEADS, bias=False)
        self.log_rate = nn.Parameter(torch.empty(HEADS).uniform_(1, 16).log())
        step = torch.empty(HEADS).uniform_(-6.9, -2.3).exp()
        self.step = nn.Parameter(step.expm1().log())
        self.gate = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = nn.RMSNorm(HEAD)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def inputs(self, x: Tensor, tail: Tensor) -> tuple[Inputs, Tensor]:
        """And the last inputs of the convolution."""
        seen = torch.cat([tail, self.qkv(x)], 1)
        mixed = F.silu(F.conv1d(seen.mT, self.conv, groups=3 * WIDTH)).mT
        q, k, v = (heads(each) for each in mixed.chunk(3, -1))
        step, beta = self.gates(x).mT.chunk(2, 1)
        decay = -self.log_rate.exp()[:, None] * F.softplus(step + self.step[:, None])
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        return Inputs(q, k, v, decay, beta.sigmoid()), seen[:, 1 - TAPS :]

    def forward(self, parts: Sequence[Tensor], behind: Sequence[Map | None]) -> tuple[Tensor, tuple[Inputs, Map]]:
        """Of all parts; of the last one also its inputs, and the state and tail behind it as a map without ``a``."""
        batch = parts[0].shape[0]
        state, tail = torch.zeros(batch, HEADS, HEAD, HEAD), torch.zeros(batch, TAPS - 1, 3 * WIDTH)
        said = []
        for x, stored in zip(parts, behind, strict=True):
            inputs, tail = self.inputs(x, tail)
            y, state = gated_delta(inputs, state)
            said.append(y)
            if stored is not None:
                state, tail = stored.a @ state + stored.b, stored.tail
        y = self.norm(torch.cat(said, 2).transpose(1, 2)).flatten(2)
        y = self.out(y * F.silu(self.gate(torch.cat([*parts], 1))))
        return y, (inputs, Map(torch.zeros_like(state), state, tail))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.q_norm, self.k_norm = nn.RMSNorm(HEAD), nn.RMSNorm(HEAD)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, parts: Sequence[Tensor], behind: Sequence[KV | None]) -> tuple[Tensor, KV]:
        """Of all parts; of the last one also its KV."""
        at, queries, keys, values, computed = 0, [], [], [], []
        for x, stored in zip(parts, behind, strict=True):
            q, k, v = (heads(each) for each in self.qkv(x).chunk(3, -1))
            own = KV(self.k_norm(k), v)
            queries.append(self.q_norm(q))
            computed.append(torch.arange(at, at + x.shape[1]))
            for kv in (own, stored) if stored is not None else (own,):
                keys.append(kv.keys)
                values.append(kv.values)
                at += kv.keys.shape[2]
        asking, standing = torch.cat(computed), torch.arange(at)
        y = F.scaled_dot_product_attention(
            turned(torch.cat(queries, 2), asking),
            turned(torch.cat(keys, 2), standing),
            torch.cat(values, 2),
            attn_mask=standing <= asking[:, None],
        )
        return self.out(y.transpose(1, 2).flatten(2)), own


def turned(x: Tensor, positions: Tensor) -> Tensor:
    angle = positions[:, None] * 10_000 ** (torch.arange(0, HEAD, 2) / -HEAD)
    left, right = x.chunk(2, -1)
    return torch.cat([left * angle.cos() - right * angle.sin(), right * angle.cos() + left * angle.sin()], -1)


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.mixer_norm, self.mlp_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.mixer = GatedDelta() if kind == "d" else Attention()
        self.up = nn.Linear(WIDTH, 2 * HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def mlp(self, x: Tensor) -> Tensor:
        gate, up = self.up(self.mlp_norm(x)).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Model(nn.Module):
    def __init__(self, words: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, WIDTH)
        self.blocks = nn.ModuleList(Block(kind) for kind in KINDS)
        self.norm = nn.RMSNorm(WIDTH)
        self.said = nn.Linear(WIDTH, words, bias=False)
        nn.init.normal_(self.words.weight, std=0.5)
        for block in self.blocks:
            nn.init.zeros_(block.down.weight)
            nn.init.zeros_(block.mixer.out.weight)

    def forward(self, *pieces: Piece) -> tuple[Tensor, list[tuple[Inputs, Map] | KV]]:
        """The logits of the last piece, and what each layer kept of it."""
        x = self.words(torch.cat([piece.tokens for piece in pieces], 1))
        sizes = [piece.tokens.shape[1] for piece in pieces]
        kept = []
        for layer, block in enumerate(self.blocks):
            behind = [piece.behind and piece.behind[layer] for piece in pieces]
            mixed, own = block.mixer(block.mixer_norm(x).split(sizes, 1), behind)
            x = x + mixed
            x = x + block.mlp(x)
            kept.append(own)
        return self.said(self.norm(x[:, -sizes[-1] :])), kept
