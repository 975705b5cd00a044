"""vLLM's recurrent layers: how each kind computes a span behind a state, and what a text does to its state.

Whatever stood before it, a text takes the state of such a layer along one affine map: ``behind = A · before + B``. A
gated delta rule has both; a short convolution knows its last inputs, and nothing before them. vLLM's own operators make
a map: ``A`` is what they make of values 0 from the unit state, and ``B`` is what the text adds to the state that they
compute anyway.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.layers.mamba.short_conv import ShortConv

from blendhub.core.errors import HubError, Unsupported
from blendhub.core.spans import Span

FORGOTTEN = 1e-3
"""A head whose ``A`` has a smaller (Frobenius) norm has forgotten what stood before the text: it is not stored."""
SCRATCH = 1
"""The row of scratch states in which ``A`` is computed: to vLLM's kernels, row 0 stands for no state."""
ALIGNMENT = 16
"""Sections of a map begin at multiples of so many bytes."""

Inputs = tuple[torch.Tensor, ...]
"""What a layer's operator is called with, by tokens; the last one takes the results."""


@dataclass
class MapInMaking:
    """The map of a text that is being computed, by one forward or by several."""

    span: Span
    begun: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """By layer: the state before the text, and ``A`` of the tokens until now."""
    done: dict[str, torch.Tensor] = field(default_factory=dict)
    """By layer: the map, as bytes."""
    tried: dict[str, tuple[torch.Tensor, torch.Tensor]] | None = None
    """Set where the maps are to be proved, and the text is computed by one span. By layer: another state, and what the
    layer's operator makes of it."""


class SpanStates(NamedTuple):
    """Where the operators of recurrent layers find the state of one span of a forward."""

    block: int
    """The block with the request's state."""
    metadata: Any
    """Those of a request with this span alone, whose state is in the block."""
    scratch: Any
    """Those of a request whose state is in row ``SCRATCH``."""
    kept: int | None = None
    """The block to which the state behind the span is copied, if it is kept."""


class RecurrentLayer(ABC):
    """One layer. Its operator finds it, and its metadata, by name in the forward context."""

    def __init__(self, name: str, layer: Any) -> None:
        self.name = name
        self._layer = layer

    @abstractmethod
    def stand_in(self, compute: Callable[[Inputs], None]) -> Any:
        """A layer to be found in the layer's place, whose operator calls ``compute``."""

    def clear(self, block: int) -> None:
        """Have a block hold the state before all tokens: some operators take a single first token for an answer's."""
        for states in self._layer.kv_cache:
            states[block].zero_()

    def copy(self, block: int, source: int) -> None:
        """Have a block hold the state of another one, too."""
        for states in self._layer.kv_cache:
            states[block].copy_(states[source])

    def compute(self, states: SpanStates, inputs: Inputs) -> None:
        """Compute a span behind the state of its request, which goes with it."""
        self._call(self._layer, states.metadata, inputs)

    def compute_map(self, states: SpanStates, inputs: Inputs, making: MapInMaking, *, is_last: bool) -> None:
        """Compute a span, and with it a part of a map, which is done with the last part."""
        self.compute(states, inputs)
        if is_last:
            making.done[self.name] = _joined(self._convolution[states.block])

    def go_over(self, block: int, map: torch.Tensor) -> None:
        """Take a request's state over the text of a map."""
        convolution = self._convolution[block]
        convolution.copy_(_section(map, convolution))

    def length(self, maps: torch.Tensor) -> int:
        """How many of the first bytes are the map of this layer."""
        return _padded(self._convolution[0].nbytes)

    @property
    def _convolution(self) -> torch.Tensor:
        """The last inputs of the layer's convolution, by blocks."""
        convolution: torch.Tensor = self._layer.kv_cache[0]
        return convolution

    def _call(self, layer: Any, metadata: Any, inputs: Inputs) -> None:
        """Call the layer's operator, which finds this layer and these metadata."""
        context: Any = get_forward_context()
        found = context.no_compile_layers[self.name], context.attn_metadata[self.name]
        context.no_compile_layers[self.name], context.attn_metadata[self.name] = layer, metadata
        try:
            self._operator(layer, inputs)
        finally:
            context.no_compile_layers[self.name], context.attn_metadata[self.name] = found

    @abstractmethod
    def _operator(self, layer: Any, inputs: Inputs) -> None: ...


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
        if layer.conv1d.bias is not None:
            raise Unsupported(f"{name} has a convolution with a bias, behind which values of 0 are not 0")
        self._heads, self._width = heads, width
        self.map_dtype: torch.dtype = layer.kv_cache[0].dtype
        """Of the matrices in maps: the model's own."""
        self._is_on_cpu = layer.kv_cache[1].device.type == "cpu"

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
        making.done[self.name] = _joined(remembers, self._convolution[states.block], matrices)

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
        super().go_over(block, map[_padded(self._heads) :])
        self._states[block].copy_(self.mapped(self._states[block], map))

    def mapped(self, state: torch.Tensor, map: torch.Tensor) -> torch.Tensor:
        """What a map makes of a state."""
        start = _padded(self._heads) + super().length(map)
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
        return _padded(self._heads) + super().length(maps) + _padded(n_bytes)

    def _product(self, kept: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """``A · state``: kernels for CPUs have a state's rows where others have its columns."""
        return kept @ state if self._is_on_cpu else state @ kept

    def _values_of_state(self, convolution: torch.Tensor) -> torch.Tensor:
        """The values in the last inputs of the convolution, where they stand behind queries and keys."""
        n = self._heads * self._width
        return convolution[-n:] if is_conv_state_dim_first() else convolution[:, -n:]


def check_maps(making: MapInMaking, layers: list[RecurrentLayer], allowed: float) -> None:
    """Raise Unsupported if a map makes of another state what the layer's operator does not make of it."""
    for layer in layers:
        if making.tried and isinstance(layer, GatedDelta):
            other, expected = making.tried[layer.name]
            mapped = layer.mapped(other, making.done[layer.name])
            error = float((mapped - expected).float().norm() / expected.float().norm())
            if not error <= allowed:
                raise Unsupported(f"{layer.name}: the map of a text is off by {error:.1%} (allowed {allowed:.1%})")


def recurrent_layer(name: str, layer: Any) -> RecurrentLayer:
    """Raises Unsupported for layers of another kind."""
    if isinstance(layer, ShortConv):
        return ShortConvolution(name, layer)
    if hasattr(layer, "_forward_core") and hasattr(layer, "conv1d") and hasattr(layer, "A_log"):
        return GatedDelta(name, layer)
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


def _joined(*parts: torch.Tensor) -> torch.Tensor:
    """The bytes of all parts, each padded."""
    sections = (part.contiguous().flatten().view(torch.uint8) for part in parts)
    return torch.cat([torch.nn.functional.pad(section, (0, -len(section) % ALIGNMENT)) for section in sections])


def _section(map: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The first bytes of a map, read as a tensor like this one."""
    return map[: like.nbytes].view(like.dtype).view(like.shape)


def _padded(n_bytes: int) -> int:
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT
