"""The way of requests' states through the tokens that a forward of BlendHub computes, and over those it leaves out.

A forward computes a request's tokens in the order of their positions, each span behind the state that the one before
has left. Where text is left out, the state goes over it by its map.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from vllm.forward_context import get_forward_context

from blendhub.core.spans import Span
from blendhub.vllm.model.states.recurrent_layer import Inputs, MapInMaking, RecurrentLayer, SpanStates


class PlacedMap(NamedTuple):
    """The map of a segment, where its text stands in a prompt."""

    span: Span
    layers: Mapping[str, torch.Tensor]
    """The map of each layer, as bytes."""


class KeptState(NamedTuple):
    """Where a state is copied to on its way: when it stands behind ``end`` tokens, the last of which is computed."""

    end: int
    blocks: Mapping[int, int]
    """The block in each table of recurrent layers."""


class StatePath(NamedTuple):
    """The way of one request's state through a forward."""

    at: int
    """How many tokens the state stands behind."""
    until: int
    """How many it is to stand behind."""
    maps: Sequence[PlacedMap] = ()
    """Ascending. What the forward leaves out on the way has a map."""
    making: Sequence[MapInMaking] = ()
    """Segments whose maps are made. No span of the forward lies in one with a part of it only."""
    keeps: KeptState | None = None


class Step(NamedTuple):
    """One span of a forward, and the maps on the way to it, and from the last span on."""

    tokens: slice
    """Their places in the forward."""
    states: Mapping[str, SpanStates]
    """By layer."""
    begins: bool
    """Whether the span begins its prompt."""
    before: Sequence[PlacedMap]
    behind: Sequence[PlacedMap]
    making: MapInMaking | None
    is_last: bool
    """Whether the segment whose map is made ends with the span."""


StatesOf = Callable[[int, Span, bool], Mapping[str, SpanStates]]
"""Gives, by layer, the states of a span of the request with this number; with scratch if a map is made of the span."""


def steps_of(
    owners: Sequence[int], spans: Sequence[Span], paths: Sequence[StatePath], states_of: StatesOf
) -> list[Step]:
    """The steps of a forward over these spans, each of the request with that number."""
    steps: list[Step] = []
    starts = [0]
    for span in spans:
        starts.append(starts[-1] + len(span))
    for owner, path in enumerate(paths):
        mine = sorted((span, start) for span, start, of in zip(spans, starts, owners, strict=False) if of == owner)
        at = path.at
        for number, (span, start) in enumerate(mine):
            end = path.until if number == len(mine) - 1 else 0
            making = next((map for map in path.making if map.span.start <= span.start < map.span.end), None)
            steps.append(
                Step(
                    slice(start, start + len(span)),
                    states_of(owner, span, making is not None),
                    span.start == 0,
                    [map for map in path.maps if at <= map.span.start and map.span.end <= span.start],
                    [map for map in path.maps if span.end <= map.span.start and map.span.end <= end],
                    making,
                    making is not None and span.end == making.span.end,
                )
            )
            at = span.end
    return steps


@contextmanager
def own_recurrence(layers: Sequence[RecurrentLayer], steps: Sequence[Step]) -> Iterator[None]:
    """In the current forward context, which must be our own, these layers compute the steps in their order."""
    context: Any = get_forward_context()
    context.no_compile_layers = dict(context.no_compile_layers)
    with ExitStack() as stack:
        for layer in layers:
            stack.enter_context(layer.computing(partial(_go, layer, steps)))
            # The operator of the stand-in computes no tokens itself.
            metadata = steps[0].states[layer.name].metadata
            has_count = hasattr(metadata, "num_actual_tokens")
            context.attn_metadata[layer.name] = replace(metadata, num_actual_tokens=0) if has_count else metadata
        yield


def _go(layer: RecurrentLayer, steps: Sequence[Step], inputs: Inputs) -> None:
    for step in steps:
        states, part = step.states[layer.name], tuple(rows[step.tokens] for rows in inputs)
        if step.begins:
            layer.clear(states.block)
        for map in step.before:
            layer.go_over(states.block, map.layers[layer.name])
        if step.making:
            layer.compute_map(states, part, step.making, is_last=step.is_last)
        else:
            layer.compute(states, part)
        if states.kept is not None:
            layer.copy(states.kept, states.block)
        for map in step.behind:
            layer.go_over(states.block, map.layers[layer.name])
