"""How much tokens' KV changes when it is computed in another context: one byte a token, for the hub to keep.

Whenever tokens are computed anew whose stored KV is in the pages, both are compared at one layer, at two thirds of the
depth: the first layers hardly depend on the context, and the last ones differ for every reason. The change of a token
is the root of the mean of two squares: the length of the difference of its keys by the length of its keys, and the same
of its values. A byte has the logarithm of the change.

1: the change is below LEAST, which is noise. 1 + STEPS: twice as much; and so on, up to 255 for a change of 2.1 or
more. The scale is the same for all models, prompts and ranks, so bytes of different measurements can be compared.
"""

import numpy as np
import numpy.typing as npt
import torch

from blendhub.contracts import PagedLayer
from blendhub.core.layout import ITEM_SIZES, KVLayout
from blendhub.vllm.model.chosen import Chosen
from blendhub.vllm.model.engine_model import EngineModel
from blendhub.vllm.model.pages import read_as_computed
from blendhub.vllm.model.platforms import Tensors
from blendhub.vllm.worker.on_the_way import OnTheWay
from blendhub.vllm.worker.ranks import Ranks

LEAST = 1 / 64
LEAST_OF_BYTES = 1 / 8
"""The value of LEAST for KV of 8 bits, whose rounding alone is a change of several hundredths."""

STEPS = 36
PIECE = 2048
"""The number of tokens that are compared at a time, which bounds the memory used."""


def compared_layer(n_layers: int, probe_layer: int) -> int | None:
    """The layer at which tokens are compared; None if there is none that depends on context and is not probed."""
    layer = max(2 * n_layers // 3, probe_layer + 1)
    return layer if layer < n_layers else None


class ComparedLayer:
    """The layer at which a worker compares tokens."""

    def __init__(self, model: EngineModel, index: int, layer: PagedLayer, layout: KVLayout, ranks: Ranks) -> None:
        self.model = model
        self.index = index
        self.layer = layer
        self.layout = layout
        self.ranks = ranks
        self.least = LEAST_OF_BYTES if ITEM_SIZES[layout.dtype] == 1 else LEAST

    def read(self, slots: torch.Tensor) -> Tensors:
        return read_as_computed(self.model, self.layer, self.layout, slots)


class Comparison:
    """Tokens of some requests before and after they are computed anew. Nothing here waits for the device."""

    def __init__(self, compared: ComparedLayer, chosen: Chosen) -> None:
        """Copies what is stored, before it is overwritten."""
        self.chosen = chosen
        self._compared = compared
        self._bytes: OnTheWay | None = None
        with torch.inference_mode():
            self._slots = compared.model.slots(chosen)
            self._stored = compared.read(self._slots)

    def finish(self) -> None:
        """Compare the stored KV with the computed KV; the result is the same on all ranks."""
        bytes_ = self._measured()
        if self._compared.ranks.number == 0:  # which reports them
            self._bytes = OnTheWay(bytes_)

    def found(self) -> npt.NDArray[np.uint8] | None:
        """A byte for each of the tokens; None while they are on their way."""
        assert self._bytes
        return self._bytes.numbers()

    def _measured(self) -> torch.Tensor:
        with torch.inference_mode():
            keys, values = self._stored
            pieces = []
            for at in range(0, len(self._slots), PIECE):
                piece = slice(at, at + PIECE)
                pieces.append(squares(self._compared.read(self._slots[piece]), (keys[piece], values[piece])))
            del self._stored
            sums = self._compared.ranks.sum(torch.cat(pieces, 1))
            return as_bytes(sums, self._compared.least)


class ComparedTokens:
    """The tokens of one request in a comparison."""

    def __init__(self, comparison: Comparison, part: int) -> None:
        self._comparison = comparison
        self._places = comparison.chosen.places(part)
        self.positions = comparison.chosen.positions[self._places]

    def found(self) -> npt.NDArray[np.uint8] | None:
        """A byte for each of the positions; None while they are on their way."""
        bytes_ = self._comparison.found()
        return None if bytes_ is None else bytes_[self._places]


def squares(fresh: Tensors, stored: Tensors) -> torch.Tensor:
    """``[4, n]``: of each token's keys the squared difference and the squared length, and of its values.

    Ranks hold different heads: the sum over them is that of the whole model.
    """
    pairs = ((new.float(), old.float()) for new, old in zip(fresh, stored, strict=True))
    return torch.stack([sum_ for new, old in pairs for sum_ in (_squared(new - old), _squared(new))])


def as_bytes(sums: torch.Tensor, least: float) -> torch.Tensor:
    """The bytes of tokens, from their sums over all ranks."""
    differences, lengths = sums[::2], sums[1::2]
    # MLA keeps no values.
    there = lengths > 0
    change = ((differences / lengths).where(there, 0).sum(0) / there.sum(0).clamp_min(1)).sqrt_()
    steps = (STEPS * torch.log2(change / least)).nan_to_num_(254.0, 254.0, 0.0)
    return (1 + steps.clamp_(0, 254)).to(torch.uint8)


def _squared(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.square().sum((1, 2))
