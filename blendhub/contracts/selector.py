"""The contract of a selector: which reused tokens are computed again."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from blendhub.plan import Span

if TYPE_CHECKING:
    import torch

    KeysAndValues = tuple[torch.Tensor, torch.Tensor]
    """K and V of n tokens, each ``[n, heads, width]``."""


class Selector(ABC):
    """Picks moved tokens to recompute. Holes are recomputed anyway and are none of its business.

    A selector either decides from the plan alone, or wants to see first how far the stored KV of an early layer is
    from what the model computes now. All ranks of a tensor-parallel group must pick the same tokens, so a selector
    is deterministic, and scores are summed over the group before they come to ``select``.
    """

    probe_layer: int = 0
    """The layer at which scores are taken; the layers before it are computed afresh for every token, and are
    exact from then on. 0: no probe, since the first layer's KV depends on nothing that moving changes."""

    def score(self, fresh: "KeysAndValues", stored: "KeysAndValues") -> "torch.Tensor":
        """How far n tokens' stored KV is from the fresh one, at the probed layer: float32 ``[n]``, never negative.

        Keys are compared after they were turned to their new positions. The sum over all ranks, which hold different
        heads, must be the score of the whole model. Stays on the tensors' device, and never waits for it.
        """
        raise TypeError(f"{type(self).__name__} asks for no probe, so it has no score")

    @abstractmethod
    def select(
        self,
        moved: Sequence[Span],
        ratio: float,
        block_tokens: int = 1,
        scores: npt.NDArray[np.float32] | None = None,
    ) -> list[Span]:
        """Parts of ``moved`` to recompute: disjoint, ascending, not empty, and joined where they touch.

        ``moved`` is disjoint and ascending. ``ratio``, from 0 to 1, is the share of the moved tokens that may be
        picked: none at 0, all at 1, at most ``ceil(ratio * tokens)`` between. A selector with a rule of its own, such
        as a fixed number a span, may ignore it, and has the capability ``own_ratio``. ``block_tokens`` is the number of
        neighbours that the device likes to compute together. ``scores[p]`` belongs to position ``p`` of the prompt,
        and is given if and only if ``probe_layer`` is not 0; scores that are not finite count as the highest.

        Bad input raises InvalidInput.
        """
