"""Short convolutions, such as LFM2 has."""

from collections.abc import Callable
from copy import copy
from typing import Any

import torch

from blendhub.vllm.model.states.recurrent_layer import Inputs, RecurrentLayer


class ShortConvolution(RecurrentLayer):
    """A short convolution, such as LFM2 has."""

    def stand_in(self, compute: Callable[[Inputs], None]) -> Any:
        def forward(hidden_states: torch.Tensor, output: torch.Tensor) -> None:
            compute((hidden_states, output))

        own: Any = copy(self._layer)
        own.forward_native = own.forward_cuda = forward
        return own

    def _operator(self, layer: Any, inputs: Inputs) -> None:
        (layer.forward_native if inputs[0].device.type == "cpu" else layer.forward_cuda)(*inputs)
