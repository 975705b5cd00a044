"""A recurrent layer of vLLM: how it computes a span behind a state, and what a text does to its state.

Whatever stood before it, a text takes the state of such a layer along one affine map: ``behind = A · before + B``. A
short convolution knows its last inputs, and nothing before them; all kinds have one. What ``A`` and ``B`` are beside
that is each kind's own.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from vllm.forward_context import get_forward_context

from blendhub.core.spans import Span

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

    @contextmanager
    def computing(self, compute: Callable[[Inputs], None]) -> Iterator[None]:
        """In the current forward context, which must be our own, have the layer's operator call ``compute``."""
        context: Any = get_forward_context()
        context.no_compile_layers[self.name] = self.stand_in(compute)
        yield

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
            making.done[self.name] = joined(self._convolution[states.block])

    def go_over(self, block: int, map: torch.Tensor) -> None:
        """Take a request's state over the text of a map."""
        convolution = self._convolution[block]
        convolution.copy_(section(map, convolution))

    def length(self, maps: torch.Tensor) -> int:
        """How many of the first bytes are the map of this layer."""
        return padded(self._convolution[0].nbytes)

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


def joined(*parts: torch.Tensor) -> torch.Tensor:
    """The bytes of all parts, each padded."""
    sections = (part.contiguous().flatten().view(torch.uint8) for part in parts)
    return torch.cat([torch.nn.functional.pad(section, (0, -len(section) % ALIGNMENT)) for section in sections])


def section(map: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The first bytes of a map, read as a tensor like this one."""
    return map[: like.nbytes].view(like.dtype).view(like.shape)


def padded(n_bytes: int) -> int:
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT
