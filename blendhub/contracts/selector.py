"""The contract of a selector: which reused tokens are computed again."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from blendhub.errors import Unsupported
from blendhub.plan import Span

if TYPE_CHECKING:
    import torch

    KeysAndValues = tuple[torch.Tensor, torch.Tensor]
    """K and V of n tokens, each ``[n, heads, width]``."""


class Selector(ABC):
    """Picks moved tokens to recompute. Holes are recomputed anyway and are none of its business.

    A selector either decides from the plan alone, or wants to see first how far the stored KV of an early layer is
    from what the model computes now. All ranks of a tensor-parallel group must pick the same tokens, so a selector
    is deterministic: the same input gives the same answer in every object with the same options, in every process,
    whatever was asked before. Scores are summed over the group before they come to ``select``.

    *Capabilities.* ``own_ratio``: between 0 and 1 a rule of its own, such as a fixed number a span, takes the place
    of the budget. ``no_ratio``: the ratio plays no part at all, not even 0 and 1.
    """

    probe_layer: int = 0
    """The layer at which scores are taken; the layers before it are computed afresh for the tokens that are probed.
    0: no probe, since the first layer's KV depends on nothing that moving changes."""

    probe_share: float = 1.0
    """How much of the moved text is probed, above 0 and at most 1: of every group of neighbours the first ones. The
    others of the group get their mean as score."""

    def score(self, fresh: "KeysAndValues", stored: "KeysAndValues") -> "torch.Tensor":
        """How far n tokens' stored KV is from the fresh one, at the probed layer: float32 ``[n]``, never negative.

        Keys are compared after they were turned to their new positions. The sum over all ranks, which hold different
        heads, must be the score of the whole model; equal KV has the score 0. Stays on the tensors' device, never waits
        for it, and changes no tensor. Fresh and stored tensors of different shapes raise InvalidInput.
        """
        raise Unsupported(f"{type(self).__name__} asks for no probe, so it has no score")

    @abstractmethod
    def select(
        self,
        moved: Sequence[Span],
        ratio: float,
        block_tokens: int = 1,
        scores: npt.NDArray[np.float32] | None = None,
    ) -> list[Span]:
        """Parts of ``moved`` to recompute: disjoint, ascending, not empty, and joined where they touch.

        ``moved`` is disjoint, ascending and without empty spans. Spans may touch: they come from different places, and
        a selector that picks by span treats each by itself. ``ratio``, from 0 to 1, is the share of the moved tokens
        that may be picked: none at 0, all at 1, at most ``ceil(ratio * tokens)`` between. A larger one never picks
        fewer. The capability ``own_ratio`` lifts the limit between 0 and 1, ``no_ratio`` all three. ``block_tokens``,
        at least 1, is the number of neighbours that the device likes to compute together.

        ``scores[p]`` belongs to position ``p`` of the prompt, at least up to the last moved one, and is given if and
        only if ``probe_layer`` is not 0. The higher it is, the more is gained from picking ``p``; scores that are not
        finite count as the highest. Outside of ``moved`` scores mean nothing.

        Bad input raises InvalidInput. Arguments are not changed.
        """
