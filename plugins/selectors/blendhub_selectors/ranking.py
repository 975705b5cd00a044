"""Selectors that put blocks in an order, and take the first of them until the budget is used up."""

from abc import abstractmethod
from math import ceil
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from blendhub.contracts import Selection, Selector
from blendhub.contracts.selection import Scores
from blendhub.plan import Span
from blendhub_selectors.blocks import Blocks, Positions
from blendhub_selectors.options import HkvdOptions, RandomOptions
from blendhub_selectors.signals import moved_mask
from blendhub_selectors.windows import Windows

if TYPE_CHECKING:
    import torch

    from blendhub.contracts.selector import KeysAndValues


class RankingSelector(Selector):
    """Cuts moved spans into blocks and picks ``ceil(ratio * tokens)`` tokens, the best blocks first."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens

    @abstractmethod
    def order(self, blocks: Blocks, scores: Scores | None) -> Positions:
        """The indices of all blocks, best first. The same whatever the budget, so that more of it only adds."""

    def pick(self, selection: Selection) -> list[Span]:
        spans = Blocks.of(selection.moved)
        blocks = spans.split(self._block_tokens or selection.block_tokens)
        budget = ceil(selection.ratio * int(spans.lengths.sum()))
        return blocks.within(budget, self.order(blocks, selection.scores)).joined()


class HkvdSelector(RankingSelector):
    """High KV deviation: what the new surroundings changed most at an early layer, they change most at all layers."""

    def __init__(self, options: HkvdOptions) -> None:
        super().__init__(options.block_tokens)
        self.probe_layer = options.layer
        self.probe_share = options.probe_share
        self._signal = options.signal
        self._window_tokens = options.window_tokens

    def pick(self, selection: Selection) -> list[Span]:
        return self._windows(selection) if self._window_tokens else super().pick(selection)

    def deviation(self, fresh: "KeysAndValues", stored: "KeysAndValues") -> "torch.Tensor":
        compared = (pair for name, *pair in zip("kv", fresh, stored, strict=True) if name in self._signal)
        return sum(_squared_distance(new, old) for new, old in compared)

    def order(self, blocks: Blocks, scores: Scores | None) -> Positions:
        assert scores is not None, "Selector.select refuses calls without scores"
        return np.argsort(-_means(blocks, scores), kind="stable")

    def _windows(self, selection: Selection) -> list[Span]:
        assert selection.scores is not None, "Selector.select refuses calls without scores"
        moved = moved_mask(selection)
        at = np.flatnonzero(moved)
        best_first = at[np.argsort(-_finite_or_highest(selection.scores[at]), kind="stable")]
        windows = Windows.at(best_first, self._window_tokens, len(moved))
        return windows.within(ceil(selection.ratio * len(at)), moved)


class RandomSelector(RankingSelector):
    """The same blocks whenever the same spans moved, so that ranks agree and measurements can be repeated."""

    def __init__(self, options: RandomOptions) -> None:
        super().__init__(options.block_tokens)
        self._seed = options.seed

    def order(self, blocks: Blocks, scores: Scores | None) -> Positions:
        return np.random.default_rng(self._seed).permutation(len(blocks.starts))


def _means(blocks: Blocks, scores: Scores) -> npt.NDArray[np.float64]:
    """The mean score of each block of ascending ones; infinite where a score is not finite."""
    if not len(blocks.starts):
        return np.empty(0)
    lengths = blocks.lengths
    first = np.cumsum(lengths) - lengths
    # The tokens between blocks are left out: reduceat adds up to where the next block begins.
    positions = np.arange(lengths.sum()) + np.repeat(blocks.starts - first, lengths)
    return np.add.reduceat(_finite_or_highest(scores[positions]), first) / lengths


def _finite_or_highest(scores: Scores) -> npt.NDArray[np.float64]:
    return np.where(np.isfinite(scores), scores, np.inf).astype(np.float64)


def _squared_distance(fresh: "torch.Tensor", stored: "torch.Tensor") -> "torch.Tensor":
    # In float32: squares of half precision overflow, and sums of them lose the small ones.
    return (fresh.float() - stored.float()).square_().sum((1, 2))
