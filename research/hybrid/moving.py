"""Documents that were computed in other company, and prompts that are put together from them."""

from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from research.hybrid.model import KV, Inputs, Map, Model, Piece, Stored, map_of

Tokens: TypeAlias = list[int]
State: TypeAlias = Callable[[Inputs, Map], Map]
"""What is stored of a layer's state: from the inputs behind the seam, and the state behind the copy."""
SEAMS = (0, 8, 16, 32)
FORGOTTEN = 1e-2
"""An ``a`` whose norm is below forgets what stood before."""


def as_batch(tokens: Tokens) -> Tensor:
    return torch.tensor([tokens])


class Copy(NamedTuple):
    """A document as it was computed somewhere."""

    tokens: Tokens
    kept: list[tuple[Inputs, Map] | KV]
    """By layer, as the model gives it."""

    @classmethod
    def computed(cls, model: Model, before: Tokens, tokens: Tokens) -> "Copy":
        _, kept = model(Piece(as_batch(before)), Piece(as_batch(tokens)))
        return cls(tokens, kept)

    def behind(self, seam: int, state: State) -> Stored:
        """What is stored of the tokens behind the seam."""
        return [
            KV(*(x[:, :, seam:] for x in layer)) if isinstance(layer, KV) else state(layer[0].behind(seam), layer[1])
            for layer in self.kept
        ]


def mapped(x: Inputs, end: Map) -> Map:
    return map_of(x, end.tail)


def norms(a: Tensor) -> Tensor:
    """By head: the most that a state may keep."""
    return torch.linalg.matrix_norm(a, 2)


def without_forgotten(x: Inputs, end: Map) -> Map:
    made = mapped(x, end)
    return made._replace(a=made.a * (norms(made.a) >= FORGOTTEN)[..., None, None])


def taken(_: Inputs, end: Map) -> Map:
    """The state that stood behind the copy, with all that had stood before it: the wrong neighbours'."""
    return end


def joined(stored: Sequence[Stored]) -> Stored:
    """Of documents one after another."""
    return [reduce(lambda first, second: first.then(second), layer) for layer in zip(*stored, strict=True)]


def mixed(states: Stored, kv: Stored) -> Stored:
    return [b if isinstance(b, KV) else a for a, b in zip(states, kv, strict=True)]


def moved(system: Tokens, copies: Sequence[Copy], seam: int, state: State = mapped) -> list[Piece]:
    stored = [copy.behind(seam, state) for copy in copies]
    if not seam:
        return [Piece(as_batch(system), joined(stored))]
    seams = [Piece(as_batch(copy.tokens[:seam]), each) for copy, each in zip(copies, stored, strict=True)]
    return [Piece(as_batch(system)), *seams]


def ways(model: Model, system: Tokens, copies: Sequence[Copy]) -> Iterator[tuple[str, list[Piece]]]:
    """Every way to have the documents in front of a question, full prefill first."""
    own = Copy.computed(model, system, [token for copy in copies for token in copy.tokens])
    exact = own.behind(0, taken)
    maps, neighbours = (joined([copy.behind(0, state) for copy in copies]) for state in (mapped, taken))
    start = as_batch(system)
    yield "full", [Piece(start, exact)]
    for seam in SEAMS:
        yield f"maps_{seam}", moved(system, copies, seam)
    for seam in (0, 32):
        yield f"maps_{seam}_forgotten", moved(system, copies, seam, without_forgotten)
        yield f"neighbours_{seam}", moved(system, copies, seam, taken)
    yield "exact_states_moved_kv", [Piece(start, mixed(exact, maps))]
    yield "exact_kv_maps", [Piece(start, mixed(maps, exact))]
    yield "exact_kv_neighbours", [Piece(start, mixed(neighbours, exact))]
    yield "exact_kv_no_states", [Piece(start, mixed(nothing(exact), exact))]
    yield "exact_states_no_kv", [Piece(start, mixed(exact, nothing(exact)))]


def nothing(stored: Stored) -> Stored:
    return [
        KV(*(x[:, :, :0] for x in each)) if isinstance(each, KV) else Map(*map(torch.zeros_like, each))
        for each in stored
    ]
