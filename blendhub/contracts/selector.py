"""The contract of a selector: which reused tokens are computed again."""

from abc import ABC, abstractmethod
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

from blendhub.contracts.selection import Selection
from blendhub.core.errors import BrokenContract, Unsupported
from blendhub.core.spans import Span, join_spans

if TYPE_CHECKING:
    import torch

KeysAndValues: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"
"""K and V of n tokens, each ``[n, heads, width]``."""


class Selector(ABC):
    """Picks moved tokens to recompute. Holes are computed in any case; they cannot be picked.

    *Measurements.* A selector decides from the prompt alone, or asks for measurements first: how far the stored KV of
    an early layer is from what the model computes now, or how much the end of the prompt attends to the stored tokens.
    The engine sums those of the ranks of a tensor-parallel group before ``select`` gets them.

    *Determinism.* All ranks of the group must pick the same tokens: the same input gives the same answer in every
    object with the same options, in every process, whatever was asked before.

    The capability ``own_ratio`` says that between 0 and 1 the selector's own rule, such as a fixed number a span, takes
    the place of the budget.
    """

    probe_layer: int = 0
    """The layer at which scores are taken; the layers before it are computed afresh for the tokens that are probed.
    0: no probe, since the first layer's KV depends on nothing that moving changes."""

    probe_share: float = 1.0
    """How much of the moved text is probed, above 0 and at most 1: of every group of neighbours the first ones. The
    others of the group get their mean as score."""

    attended_layers: tuple[float, ...] = ()
    """The layers whose attention is measured, as fractions of the model's depth, from 0 to below 1. Empty: none. The
    tokens that ask are computed up to the last of these layers, over the stored KV as it is. Some models have attention
    that cannot be measured; then ``select`` decides without it."""

    attending_tokens: int = 32
    """How many tokens at the prompt's end attend when attention is measured, at least 1: those of the question. Where
    it has hardly any, the last tokens that nothing stored covers attend; where everything is stored, the last tokens
    of the prompt. ``attended`` is the sum of their attention weights over tokens, heads and layers."""

    @abstractmethod
    def select(self, selection: Selection) -> list[Span]:
        """Parts of ``selection.moved`` to recompute: a list of spans of int, disjoint, ascending and not empty.

        At a ratio of 0 it picks nothing, at 1 everything that moved, and between at most ``ceil(ratio * tokens)`` of
        the moved tokens. A larger ratio never picks fewer. The capability ``own_ratio`` lifts the limit between 0 and
        1. Nothing of the selection is changed.
        """

    def score(self, fresh: "KeysAndValues", stored: "KeysAndValues") -> "torch.Tensor":
        """How far n tokens' stored KV is from the fresh one, at the probed layer: float32 ``[n]``, never negative.

        Fresh and stored tensors have the same shapes. Keys are compared after they were rotated to their new
        positions. The sum over all ranks, which hold different heads, must be the score of the whole model; equal KV
        has the score 0. Stays on the tensors' device, never waits for it, and changes no tensor.
        """
        raise Unsupported(f"{type(self).__name__} asks for no probe, so it has no score")


def checked_picks(selector: Selector, selection: Selection) -> list[Span]:
    """What ``select`` answers, with spans that touch made one. Raises BrokenContract for what it must not answer.

    KV of these spans is computed and written, and all of ``moved`` belongs to this request.
    """
    picks: object = selector.select(selection)
    name = f"{type(selector).__module__}.{type(selector).__qualname__}.select"
    if not isinstance(picks, list) or not all(map(_is_span, picks)):
        raise BrokenContract(f"{name} should return a list of Span of int, got {picks!r:.100}")
    ascend = all(map(len, picks)) and all(span.end <= following.start for span, following in pairwise(picks))
    joined = join_spans(picks) if ascend else []
    if not ascend or not _lie_in(joined, join_spans(selection.moved)):
        moved = list(selection.moved)
        raise BrokenContract(f"{name} should pick ascending, disjoint parts of {moved!r:.200}, got {picks!r:.200}")
    return joined


def _is_span(span: object) -> bool:
    # NumPy's numbers would get into messages, which do not take them.
    return isinstance(span, Span) and type(span.start) is type(span.end) is int


def _lie_in(spans: list[Span], places: list[Span]) -> bool:
    """Whether each span lies in one of the places; both ascend."""
    at = 0
    for span in spans:
        while at < len(places) and places[at].end < span.end:
            at += 1
        if at == len(places) or span.start < places[at].start:
            return False
    return True
