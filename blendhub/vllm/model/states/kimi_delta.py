"""Kimi delta attention (KDA), such as Kimi Linear and Ling 3 have: a gated delta rule with a gate for each channel."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch

from blendhub.vllm.model.states.gated_delta import GatedDelta
from blendhub.vllm.model.states.recurrent_layer import Inputs

VALUES = ("mixed_qkv", "v_proj_states")
"""The input whose last columns, or all, are the values."""
OUTPUT = "core_attn_out"
OF_BATCHES = ("g1", "beta", OUTPUT)
"""Inputs with a dimension of batches before that of tokens; there is one batch."""


class KimiDelta(GatedDelta):
    """Kimi delta attention. Its maps are made as those of other gated delta rules.

    The operator is a method of the layer. Models call it on the layer itself (Kimi Linear) or on what they find by the
    layer's name (Ling 3), so it is replaced on the layer for as long as a forward of BlendHub's own runs.
    """

    def __init__(self, name: str, layer: Any) -> None:
        super().__init__(name, layer)
        self._rows_are_keys = False
        given = _inputs_of(layer)
        (values,) = (name for name in given if name in VALUES)
        self._names = [values, *(name for name in given if name not in (values, OUTPUT)), OUTPUT]
        """The names of the inputs, in the order in which maps are made with them."""

    @contextmanager
    def computing(self, compute: Callable[[Inputs], None]) -> Iterator[None]:
        def forward(**given: torch.Tensor) -> None:
            compute(tuple(given[name][0] if name in OF_BATCHES else given[name] for name in self._names))

        self._layer._forward = forward
        try:
            yield
        finally:
            del self._layer._forward

    def _operator(self, layer: Any, inputs: Inputs) -> None:
        given = zip(self._names, inputs, strict=True)
        type(layer)._forward(layer, **{name: rows[None] if name in OF_BATCHES else rows for name, rows in given})


def is_kimi_delta(layer: Any) -> bool:
    given = _inputs_of(layer)
    return {*OF_BATCHES} <= {*given} and not {*VALUES}.isdisjoint(given)


def _inputs_of(layer: Any) -> list[str]:
    """The names of what the layer's operator is called with; none if it has no such operator."""
    operator = getattr(type(layer), "_forward", None)
    return list(signature(operator).parameters)[1:] if operator else []
