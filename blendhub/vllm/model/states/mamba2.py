"""Mamba 2, such as Nemotron 3, Granite 4, Falcon-H1 and Bamba have.

Of a head's state, each token keeps a share, the same of all numbers. So ``A`` is one number a head, which follows from
what the layer says of time steps alone.
"""

from collections.abc import Callable
from copy import copy
from typing import Any

import torch
from torch.nn.functional import softplus

from blendhub.core.errors import Unsupported
from blendhub.vllm.model.states.head_states import HeadStates
from blendhub.vllm.model.states.recurrent_layer import Inputs, SpanStates, padded, section


class Mamba2(HeadStates):
    """Mamba 2: a map has ``A`` in float32, a number for each head, and ``B``."""

    def __init__(self, name: str, layer: Any) -> None:
        super().__init__(name, layer)
        if len(layer.kv_cache) > 2:
            raise Unsupported(f"{name} keeps the last tokens beside its state (use_replayssm), so that no map fits it")

    def stand_in(self, compute: Callable[[Inputs], None]) -> Any:
        def forward(projected_states: torch.Tensor, output: torch.Tensor) -> None:
            compute((projected_states, output))

        own: Any = copy(self._layer)
        own.conv_ssm_forward = forward
        return own

    def _operator(self, layer: Any, inputs: Inputs) -> None:
        layer.conv_ssm_forward(*inputs)

    def _unit(self) -> torch.Tensor:
        return torch.ones_like(self._layer.A, dtype=torch.float32)

    def _kept(self, states: SpanStates, inputs: Inputs, kept: torch.Tensor) -> torch.Tensor:
        # The steps of its heads are the last of what a token brings.
        steps = softplus(inputs[0][:, -len(kept) :].float() + self._layer.dt_bias.float())
        return kept * torch.exp(self._layer.A.float() * steps.sum(0))

    def _product(self, kept: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        return kept[:, None, None] * state

    def _parts(self, kept: torch.Tensor, added: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return kept, added.to(self.map_dtype)

    def _behind(self, state: torch.Tensor, parts: torch.Tensor) -> torch.Tensor:
        kept = section(parts, self._unit())
        added = section(parts[padded(kept.nbytes) :], state.to(self.map_dtype))
        kept, added = (part.to(state.device, non_blocking=True) for part in (kept, added))
        return (self._product(kept, state.float()) + added).to(state.dtype)

    def _length(self, parts: torch.Tensor) -> int:
        n_bytes = self._states[0].numel() * self.map_dtype.itemsize
        return padded(4 * len(self._layer.A)) + padded(n_bytes)
