"""Layers whose heads keep a state each, behind a convolution: how their maps are made, proved and used."""

from abc import abstractmethod
from collections.abc import Sequence
from copy import copy
from typing import Any

import torch

from blendhub.vllm.model.states.recurrent_layer import (
    SCRATCH,
    Inputs,
    MapInMaking,
    RecurrentLayer,
    SpanStates,
    joined,
)


class HeadStates(RecurrentLayer):
    """A layer whose heads keep a state each, a matrix, behind a convolution.

    A map is the last inputs of the convolution, and behind them what the kind has for ``A`` and ``B``: what the text
    adds to the state that is computed anyway.
    """

    def __init__(self, name: str, layer: Any) -> None:
        super().__init__(name, layer)
        self.map_dtype: torch.dtype = layer.kv_cache[0].dtype
        """The dtype of the matrices in maps: the model's own."""

    @property
    def _states(self) -> torch.Tensor:
        """The states of the heads, by blocks."""
        states: torch.Tensor = self._layer.kv_cache[1]
        return states

    def compute_map(self, states: SpanStates, inputs: Inputs, making: MapInMaking, *, is_last: bool) -> None:
        state, convolution = self._states[states.block], self._convolution[states.block]
        before, kept = making.begun.pop(self.name, (state.clone(), self._unit()))
        if making.tried is not None:
            other = 1 - 2 * state
            making.tried[self.name] = other, self._computed(states, convolution, other, inputs)
        kept = self._kept(states, inputs, kept)
        self.compute(states, inputs)
        if not is_last:
            making.begun[self.name] = before, kept
            return
        added = state.float() - self._product(kept.float(), before.float())
        making.done[self.name] = joined(convolution, *self._parts(kept, added))

    def _computed(
        self, states: SpanStates, convolution: torch.Tensor, state: torch.Tensor, inputs: Inputs
    ) -> torch.Tensor:
        """The state behind a span that the operator computes behind another state, in scratch."""
        scratch: Any = copy(self._layer)
        scratch.kv_cache = [rows.new_zeros(SCRATCH + 1, *rows.shape[1:]) for rows in self._layer.kv_cache]
        scratch.kv_cache[0][SCRATCH], scratch.kv_cache[1][SCRATCH] = convolution, state
        # Copies, because some operators write what they convolve into their inputs, which are computed once more.
        own = (*(rows.clone() for rows in inputs[:-1]), torch.empty_like(inputs[-1]))
        self._call(scratch, states.scratch, own)
        behind: torch.Tensor = scratch.kv_cache[1][SCRATCH]
        return behind

    def go_over(self, block: int, map: torch.Tensor) -> None:
        super().go_over(block, map)
        self._states[block].copy_(self.mapped(self._states[block], map))

    def mapped(self, state: torch.Tensor, map: torch.Tensor) -> torch.Tensor:
        """What a map makes of a state, beside it."""
        return self._behind(state, map[super().length(map) :])

    def length(self, maps: torch.Tensor) -> int:
        start = super().length(maps)
        return start + self._length(maps[start:])

    @abstractmethod
    def _unit(self) -> torch.Tensor:
        """``A`` of no tokens."""

    @abstractmethod
    def _kept(self, states: SpanStates, inputs: Inputs, kept: torch.Tensor) -> torch.Tensor:
        """``A`` of the tokens of a map up to the end of a span, before which it is ``kept``, and which is not computed
        yet."""

    @abstractmethod
    def _product(self, kept: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """``A · state``."""

    @abstractmethod
    def _parts(self, kept: torch.Tensor, added: torch.Tensor) -> Sequence[torch.Tensor]:
        """``A`` and ``B`` as they are stored."""

    @abstractmethod
    def _behind(self, state: torch.Tensor, parts: torch.Tensor) -> torch.Tensor:
        """What the stored parts, which may lie in memory that others read, make of a state."""

    @abstractmethod
    def _length(self, parts: torch.Tensor) -> int:
        """How many bytes the stored parts take that begin here."""
