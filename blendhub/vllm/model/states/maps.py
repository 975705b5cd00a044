"""Maps of all recurrent layers of a model: which kind makes them, how they lie one behind the other, their proof."""

from typing import Any

import torch
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.model_executor.layers.mamba.short_conv import ShortConv

from blendhub.core.errors import HubError, Unsupported
from blendhub.vllm.model.states.gated_delta import GatedDelta
from blendhub.vllm.model.states.head_states import HeadStates
from blendhub.vllm.model.states.kimi_delta import KimiDelta, is_kimi_delta
from blendhub.vllm.model.states.mamba2 import Mamba2
from blendhub.vllm.model.states.recurrent_layer import MapInMaking, RecurrentLayer
from blendhub.vllm.model.states.short_convolution import ShortConvolution


def check_maps(making: MapInMaking, layers: list[RecurrentLayer], allowed: float) -> None:
    """Raise Unsupported if a map makes of another state what the layer's operator does not make of it."""
    for layer in layers:
        if making.tried and isinstance(layer, HeadStates):
            other, expected = making.tried[layer.name]
            mapped = layer.mapped(other, making.done[layer.name])
            error = float((mapped - expected).float().norm() / expected.float().norm())
            if not error <= allowed:
                raise Unsupported(f"{layer.name}: the map of a text is off by {error:.1%} (allowed {allowed:.1%})")


def recurrent_layer(name: str, layer: Any) -> RecurrentLayer:
    """Raises Unsupported for layers of another kind."""
    if isinstance(layer, ShortConv):
        return ShortConvolution(name, layer)
    if isinstance(layer, MambaMixer2):
        return Mamba2(name, layer)
    if hasattr(layer, "_forward_core") and hasattr(layer, "conv1d") and hasattr(layer, "A_log"):
        return GatedDelta(name, layer)
    if is_kimi_delta(layer):
        return KimiDelta(name, layer)
    raise Unsupported(f"{name} is a {type(layer).__name__}, of which BlendHub makes no map")


def packed(making: MapInMaking, layers: list[RecurrentLayer]) -> torch.Tensor:
    """The maps of all layers, one behind the other, as bytes."""
    return torch.cat([making.done[layer.name] for layer in layers])


def unpacked(maps: torch.Tensor, layers: list[RecurrentLayer]) -> dict[str, torch.Tensor]:
    """The map of each layer. Raises HubError if they are not as long as they say."""
    by_layer: dict[str, torch.Tensor] = {}
    for layer in layers:
        n = layer.length(maps)
        if n > len(maps):
            raise HubError("the map of a segment is shorter than it says; its KV is computed")
        by_layer[layer.name], maps = maps[:n], maps[n:]
    return by_layer
