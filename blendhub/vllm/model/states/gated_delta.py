"""Gated delta rules behind a convolution, such as Qwen3-Next and Qwen3.5 have.

vLLM's own operator makes a map: ``A`` is what it makes of values 0 from the unit state, and ``B`` is what the text adds
to the state that it computes anyway.
"""

import sys
from collections.abc import Callable
from copy import copy
from typing import Any

import torch
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

from blendhub.core.errors import Unsupported
from blendhub.vllm.model.states.recurrent_layer import (
    SCRATCH,
    Inputs,
    MapInMaking,
    RecurrentLayer,
    SpanStates,
    joined,
    padded,
)

FORGOTTEN = 1e-3
"""A head whose ``A`` has a smaller (Frobenius) norm has forgotten what stood before the text: it is not stored."""


class GatedDelta(RecurrentLayer):
    """A gated delta rule behind a convolution, such as Qwen3-Next and Qwen3.5 have.

    A map is a byte for each head, which says whether it remembers; the last inputs of the convolution; ``B`` of all
    heads; and ``A`` of those that remember.
    """

    def __init__(self, name: str, layer: Any) -> None:
        super().__init__(name, layer)
        heads, width, key_width = layer.kv_cache[1].shape[1:]
        if width != key_width:
            raise Unsupported(f"{name} has keys of {key_width} numbers and values of {width}, so that no map fits it")
        # Some layers have a convolution each for queries, keys and values.
        convolution = getattr(layer, "conv1d", None) or layer.v_conv1d
        if convolution.bias is not None:
            raise Unsupported(f"{name} has a convolution with a bias, behind which values of 0 are not 0")
        self._heads, self._width = heads, width
        self.map_dtype: torch.dtype = layer.kv_cache[0].dtype
        """Of the matrices in maps: the model's own."""
        self._is_on_cpu = layer.kv_cache[1].device.type == "cpu"
        self._rows_are_keys = self._is_on_cpu
        """Of a state; kernels for GPUs have values in its rows."""

    @property
    def _states(self) -> torch.Tensor:
        """The states of the heads, by blocks."""
        states: torch.Tensor = self._layer.kv_cache[1]
        return states

    def stand_in(self, compute: Callable[[Inputs], None]) -> Any:
        own: Any = copy(self._layer)
        if self._is_on_cpu:
            # The operator is a function, which asks the layer for nothing before its name.
            own.__class__ = type("OwnLayer", (type(own),), {"prefix": property(lambda _: self._enter(compute))})
            return own

        def forward(mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, core_attn_out: torch.Tensor) -> None:
            compute((mixed_qkv, b, a, core_attn_out))

        own._forward_core = forward
        return own

    def _enter(self, compute: Callable[[Inputs], None]) -> str:
        """Compute what the operator that asks for the name was called with. It then finds metadata of no tokens."""
        given = sys._getframe(2).f_locals
        compute((given["mixed_qkv"], given["b"], given["a"], given["core_attn_out"]))
        return self.name

    def _operator(self, layer: Any, inputs: Inputs) -> None:
        if not self._is_on_cpu:
            layer._forward_core(*inputs)
            return
        from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

        mixed, b, a, output = inputs
        gdn_attention.cpu_gdn_attention_core(mixed, b, a, output, self.name)

    def compute_map(self, states: SpanStates, inputs: Inputs, making: MapInMaking, *, is_last: bool) -> None:
        state = self._states[states.block]
        unit = torch.eye(self._width, dtype=state.dtype, device=state.device).expand_as(state)
        before, kept = making.begun.pop(self.name, (state.clone(), unit))
        mixed, *gates, output = inputs
        convolution = self._convolution[states.block].clone()
        if making.tried is not None:
            other = 1 - 2 * state
            making.tried[self.name] = other, self._computed(states, convolution, other, inputs)
        self._values_of_state(convolution).zero_()
        mixed = mixed.clone()
        mixed[:, -self._heads * self._width :] = 0
        kept = self._computed(states, convolution, kept, (mixed, *gates, output))
        self.compute(states, inputs)
        if not is_last:
            making.begun[self.name] = before, kept
            return
        added = state.float() - self._product(kept.float(), before.float())
        remembers = torch.linalg.matrix_norm(kept.float()) >= FORGOTTEN
        matrices = torch.cat([added, kept[remembers]]).to(self.map_dtype)
        making.done[self.name] = joined(remembers, self._convolution[states.block], matrices)

    def _computed(
        self, states: SpanStates, convolution: torch.Tensor, state: torch.Tensor, inputs: Inputs
    ) -> torch.Tensor:
        """The state behind a span that the operator computes behind another state, in scratch."""
        scratch: Any = copy(self._layer)
        scratch.kv_cache = [rows.new_zeros(SCRATCH + 1, *rows.shape[1:]) for rows in self._layer.kv_cache]
        scratch.kv_cache[0][SCRATCH], scratch.kv_cache[1][SCRATCH] = convolution, state
        self._call(scratch, states.scratch, (*inputs[:-1], torch.empty_like(inputs[-1])))
        behind: torch.Tensor = scratch.kv_cache[1][SCRATCH]
        return behind

    def go_over(self, block: int, map: torch.Tensor) -> None:
        super().go_over(block, map[padded(self._heads) :])
        self._states[block].copy_(self.mapped(self._states[block], map))

    def mapped(self, state: torch.Tensor, map: torch.Tensor) -> torch.Tensor:
        """What a map makes of a state."""
        start = padded(self._heads) + super().length(map)
        matrices = map[start:].view(self.map_dtype).view(-1, self._width, self._width)
        # Copies, because the map may lie in memory that others read.
        matrices = matrices.to(state.device, non_blocking=True).to(state.dtype, copy=True)
        behind, kept = matrices[: self._heads], matrices[self._heads :]
        remembering = self._flags(map).nonzero().flatten().to(state.device)
        behind[remembering] += self._product(kept, state[remembering])
        return behind

    def _flags(self, maps: torch.Tensor) -> torch.Tensor:
        """Which heads remember."""
        return maps[: self._heads].ne(0)

    def length(self, maps: torch.Tensor) -> int:
        n = self._heads + int(self._flags(maps).sum())
        n_bytes = n * self._width**2 * self.map_dtype.itemsize
        return padded(self._heads) + super().length(maps) + padded(n_bytes)

    def _product(self, kept: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """``A · state``, as the layer's kernels keep states."""
        return kept @ state if self._rows_are_keys else state @ kept

    def _values_of_state(self, convolution: torch.Tensor) -> torch.Tensor:
        """The values in the last inputs of the convolution, where they stand behind queries and keys."""
        n = self._heads * self._width
        return convolution[-n:] if is_conv_state_dim_first() else convolution[:, -n:]
