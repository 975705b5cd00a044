"""Picks the tokens whose stored KV at an early layer deviates most from what the model computes now."""

from math import ceil
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt

from blendhub.contracts import Selection, Selector
from blendhub.contracts.selection import Scores
from blendhub.core.spans import Span
from blendhub_selectors.blocks import Blocks
from blendhub_selectors.options import HkvdOptions
from blendhub_selectors.signals import finite_or_highest, highest, moved_mask

if TYPE_CHECKING:
    import torch

    from blendhub.contracts.selector import KeysAndValues

MIN_BLOCK_TOKENS = 16
"""Not all tokens are probed, so that fewer neighbours may have one score."""


class HkvdSelector(Selector):
    """High KV deviation: what the new surroundings changed most at an early layer, they change most at all layers."""

    def __init__(self, options: HkvdOptions) -> None:
        self._block_tokens = options.block_tokens
        self.probe_layer = options.layer
        self.probe_share = options.probe_share
        self._signal = options.signal
        self._window_tokens = options.window_tokens

    def select(self, selection: Selection) -> list[Span]:
        assert selection.scores is not None, "a selector that probes gets scores"
        return (self._windows if self._window_tokens else self._blocks)(selection, selection.scores)

    def score(self, fresh: "KeysAndValues", stored: "KeysAndValues") -> "torch.Tensor":
        compared = (pair for name, *pair in zip("kv", fresh, stored, strict=True) if name in self._signal)
        return cast("torch.Tensor", sum(_squared_distance(new, old) for new, old in compared))

    def _blocks(self, selection: Selection, scores: Scores) -> list[Span]:
        """``ceil(ratio * tokens)`` tokens in blocks, the best first."""
        spans = Blocks.of(selection.moved)
        blocks = spans.split(self._block_tokens or max(MIN_BLOCK_TOKENS, selection.block_tokens))
        budget = ceil(selection.ratio * int(spans.lengths.sum()))
        return blocks.within(budget, np.argsort(-_means(blocks, scores), kind="stable")).joined()

    def _windows(self, selection: Selection, scores: Scores) -> list[Span]:
        moved = moved_mask(selection)
        windows = highest(scores, moved, self._window_tokens)
        return windows.within(ceil(selection.ratio * int(moved.sum())), moved)


def _means(blocks: Blocks, scores: Scores) -> npt.NDArray[np.float64]:
    """The mean score of each block of ascending ones; infinite where a score is not finite."""
    if not len(blocks.starts):
        return np.empty(0)
    lengths = blocks.lengths
    first = np.cumsum(lengths) - lengths
    # The tokens between blocks are left out: reduceat adds up to where the next block begins.
    positions = np.arange(lengths.sum()) + np.repeat(blocks.starts - first, lengths)
    return np.add.reduceat(finite_or_highest(scores[positions]), first) / lengths


def _squared_distance(fresh: "torch.Tensor", stored: "torch.Tensor") -> "torch.Tensor":
    # In float32: squares of half precision overflow, and sums of them lose the small ones.
    return (fresh.float() - stored.float()).square_().sum((1, 2))
