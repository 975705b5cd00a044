"""The contract of attention for chosen tokens, which a device may offer in place of the engine's own attention."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch


class AttentionRules(NamedTuple):
    """The properties of a layer that decide how its tokens attend."""

    heads: int
    """The heads of queries. A head of keys serves as many neighbouring heads of queries as there are more of these."""
    scale: float
    """By which products of queries and keys are multiplied."""
    window: int | None = None
    """How many of the last keys a token attends to, its own included; None: all."""
    chunk: int | None = None
    """The positions are cut in chunks of so many, and a token attends to keys of its own chunk only; None: to all."""
    soft_cap: float = 0.0
    """Products of queries and keys are bent so that they stay below it; 0: they are not."""
    sinks: "torch.Tensor | None" = None
    """One number for each head of queries: a key without a value, which every token attends to."""
    latent: int = 0
    """So many of the first items of a key are its value (MLA); 0: values have their own pages."""
    key_scale: float = 1.0
    """By which keys in the pages are multiplied: 8-bit floats are kept divided by a scale."""
    value_scale: float = 1.0


class ChosenTokens(NamedTuple):
    """The tokens of one forward, of one prompt or of several, in any order."""

    positions: npt.NDArray[np.int64]
    """The position of each token in its prompt."""
    prompts: npt.NDArray[np.int64]
    """The prompt of each token, which is a row of ``blocks``."""
    blocks: npt.NDArray[np.int32]
    """``[prompts, blocks]``: the blocks of each prompt, at least up to its last chosen token, or as far as it is
    readable. Any block may stand for one that no chosen token attends to: engines free those that left a window."""
    readable: npt.NDArray[np.bool_] | None = None
    """``[prompts, positions]``: the tokens whose keys in the pages ``probe`` may read, none behind these; None: of a
    forward, which calls ``attend``."""


class ChosenAttention(ABC):
    """Attention of chosen tokens over the pages of a group of layers that the device is attached to.

    A token at position p attends to keys of its prompt at positions <= p, as far as the layer's rules let it. All work
    is submitted to the engine's current stream, and nothing waits for the device.
    """

    @abstractmethod
    def begin(self, tokens: ChosenTokens) -> None:
        """The calls until the next ``begin`` are of a forward over these tokens, or of a probe if ``readable`` says
        which keys may be read."""

    @abstractmethod
    def attend(self, layer: int, queries: "torch.Tensor", output: "torch.Tensor") -> None:
        """Write to ``output`` what each token takes from the values of all keys in the pages, the chosen tokens' own
        included: ``[tokens, heads, width of a value]``; 0 where it sees no key.

        ``queries`` are ``[tokens, heads, width of a key]``. Both may have any strides but the last.
        """

    @abstractmethod
    def probe(
        self,
        layer: int,
        queries: "torch.Tensor",
        keys: "torch.Tensor",
        values: "torch.Tensor",
        output: "torch.Tensor",
        received: "torch.Tensor | None" = None,
    ) -> None:
        """Like ``attend``, but tokens attend to readable keys in the pages, and to each other's keys and values, which
        are given as ``[tokens, heads of keys, width]``, without scales, and are in no page.

        ``received``, float32 ``[prompts, positions]`` like ``readable``: to each readable key the weights are added
        that its prompt's tokens give it, in all heads.
        """
