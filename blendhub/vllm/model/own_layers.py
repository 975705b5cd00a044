"""Attention of our own in forwards of our own.

vLLM's attention operators find their layer by its name in the forward context. So a forward under our context can bring
layers whose attention is ours, in eager and in compiled models; the layers of the engine's forwards stay as they are.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionType

from blendhub.core.errors import Unsupported
from blendhub.devices.chosen_attention import AttentionRules

Attend = Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Called with a layer, the queries, keys and values of the forward's tokens, and where to put what they attend to."""


class OwnAttention:
    """Stands where a layer has its ``impl``. All but the attention, such as the writing of KV, is done by that one."""

    def __init__(self, theirs: Any, attend: Attend) -> None:
        self._theirs = theirs
        self._attend = attend

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: Any,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if output_scale is not None or output_block_scale is not None:
            raise Unsupported(f"{layer.layer_name} quantises what attention returns")
        if query.dtype.itemsize == 1:
            query = query.float() * layer._q_scale
        self._attend(layer, query, key, value, output)
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._theirs, name)


@contextmanager
def own_attention(names: Sequence[str], attend: Attend) -> Iterator[None]:
    """In the current forward context, which must be our own, ``attend`` is the attention of these layers."""
    context = get_forward_context()
    layers = dict(context.no_compile_layers)
    for name in names:
        layers[name] = copy(layers[name])
        layers[name].impl = OwnAttention(layers[name].impl, attend)
    context.no_compile_layers = layers
    yield


def rules_of(layer: Any) -> AttentionRules:
    """How tokens attend in one of vLLM's layers; raises Unsupported for what our attention cannot compute."""
    # Subclasses have other rules, such as chunks, which only their backends know.
    if type(layer) is not Attention:
        raise Unsupported(f"{layer.layer_name} is a {type(layer).__name__}")
    impl = layer.impl
    if layer.attn_type != AttentionType.DECODER:
        raise Unsupported(f"{layer.layer_name} is no attention of a decoder, but {layer.attn_type!r}")
    if getattr(impl, "alibi_slopes", None) is not None:
        raise Unsupported(f"{layer.layer_name} has ALiBi")
    if layer.kv_sharing_target_layer_name is not None:
        raise Unsupported(f"{layer.layer_name} reads the KV of {layer.kv_sharing_target_layer_name}")
    return AttentionRules(
        scale=impl.scale,
        window=layer.sliding_window,
        soft_cap=getattr(impl, "logits_soft_cap", None) or 0.0,
        sinks=getattr(impl, "sinks", None),
    )
