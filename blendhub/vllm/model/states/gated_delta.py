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
from blendhub.vllm.model.states.head_states import HeadStates
from blendhub.vllm.model.states.recurrent_layer import Inputs, SpanStates, padded

FORGOTTEN = 1e-3
"""A head whose ``A`` has a smaller (Frobenius) norm has forgotten what stood before the text: it is not stored."""


class GatedDelta(HeadStates):
    """A gated delta rule: a map has a byte for each head, which says whether it remembers; ``B`` of all heads; and
    ``A`` of those that remember."""

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
        self._is_on_cpu = layer.kv_cache[1].device.type == "cpu"
        self._rows_are_keys = self._is_on_cpu
        """Whether a state has a row for each number of a key; kernels for GPUs have one for each of a value."""

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

    def _unit(self) -> torch.Tensor:
        state = self._states[0]
        return torch.eye(self._width, dtype=state.dtype, device=state.device).expand_as(state)

    def _kept(self, states: SpanStates, inputs: Inputs, kept: torch.Tensor) -> torch.Tensor:
        mixed, *others = inputs
        convolution, mixed = self._convolution[states.block].clone(), mixed.clone()
        self._values_of_state(convolution).zero_()
        mixed[:, -self._heads * self._width :] = 0
        return self._computed(states, convolution, kept, (mixed, *others))

    def _parts(self, kept: torch.Tensor, added: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        remembers = torch.linalg.matrix_norm(kept.float()) >= FORGOTTEN
        return remembers, torch.cat([added, kept[remembers]]).to(self.map_dtype)

    def _behind(self, state: torch.Tensor, parts: torch.Tensor) -> torch.Tensor:
        matrices = parts[padded(self._heads) :].view(self.map_dtype).view(-1, self._width, self._width)
        matrices = matrices.to(state.device, non_blocking=True).to(state.dtype, copy=True)
        behind, kept = matrices[: self._heads], matrices[self._heads :]
        remembering = self._flags(parts).nonzero().flatten().to(state.device)
        behind[remembering] += self._product(kept, state[remembering])
        return behind

    def _flags(self, parts: torch.Tensor) -> torch.Tensor:
        """Which heads remember."""
        return parts[: self._heads].ne(0)

    def _length(self, parts: torch.Tensor) -> int:
        n = self._heads + int(self._flags(parts).sum())
        return padded(self._heads) + padded(n * self._width**2 * self.map_dtype.itemsize)

    def _product(self, kept: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """``A · state``, as the layer's kernels keep states."""
        return kept @ state if self._rows_are_keys else state @ kept

    def _values_of_state(self, convolution: torch.Tensor) -> torch.Tensor:
        """The values in the last inputs of the convolution, where they stand behind queries and keys."""
        n = self._heads * self._width
        return convolution[-n:] if is_conv_state_dim_first() else convolution[:, -n:]
