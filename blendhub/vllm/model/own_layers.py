"""Attention of our own in forwards of our own.

vLLM's attention operators find their layer by its name in the forward context. So a forward under our context can bring
layers whose attention is ours, in eager and in compiled models; the layers of the engine's forwards stay as they are.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from typing import Any

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention, ChunkedLocalAttention, MLAAttention
from vllm.v1.attention.backend import AttentionType

from blendhub.contracts import AttentionRules
from blendhub.core.errors import Unsupported
from blendhub.vllm.model.platform import keeps_latent

Attend = Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Called with a layer, the queries, keys and values of the forward's tokens, and where to put what they attend to.

With MLA the only head of keys is the latent with its rotated part, values are the latent, and queries are projected so
that they fit (absorbed).
"""


class OwnAttention:
    """Stands where a layer has its ``impl``. All but the attention, such as the writing of KV, is done by that one.

    If the context has metadata, they are of the tokens from ``n_ours`` on, which attend by that one, too.
    """

    def __init__(self, theirs: Any, attend: Attend, n_ours: int = 0) -> None:
        self._theirs = theirs
        self._attend = attend
        self._n_ours = n_ours

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
        _refuse_scales(layer, output_scale, output_block_scale)
        if attn_metadata is not None:
            queries, keys, values, taken = (part[self._n_ours :] for part in (query, key, value, output))
            self._theirs.forward(layer, queries, keys, values, kv_cache, attn_metadata, output=taken)
        if query.dtype.itemsize == 1:
            query = (query.float() * layer._q_scale).to(output.dtype)
        self._attend(layer, query, key, value, output)
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._theirs, name)


def _attend_to_latent(
    layer: Any,
    attend: Attend,
    query: torch.Tensor,
    latent: torch.Tensor,
    rotated: torch.Tensor,
    kv_cache: Any,
    attn_metadata: Any,
    output: torch.Tensor,
    output_scale: torch.Tensor | None = None,
    output_block_scale: torch.Tensor | None = None,
    **others: Any,
) -> torch.Tensor:
    """Stands where a layer with MLA has its ``forward_impl``. The context is not projected again, only the queries."""
    _refuse_scales(layer, output_scale, output_block_scale)
    plain, turned = query.split_with_sizes([layer.qk_nope_head_dim, layer.qk_rope_head_dim], -1)
    absorbed = torch.cat([torch.bmm(plain.transpose(0, 1), layer.W_UK_T).transpose(0, 1), turned], -1)
    keys = torch.cat([latent, rotated.flatten(1)], -1)[:, None]
    taken = latent.new_empty(len(query), layer.num_heads, layer.kv_lora_rank)
    attend(layer, absorbed, keys, latent[:, None], taken)
    projected = output.view(-1, layer.num_heads, layer.v_head_dim)
    torch.bmm(taken.transpose(0, 1), layer.W_UV, out=projected.transpose(0, 1))
    return output


def _refuse_scales(layer: Any, *scales: torch.Tensor | None) -> None:
    if any(scale is not None for scale in scales):
        raise Unsupported(f"{layer.layer_name} quantises what attention returns")


@contextmanager
def own_attention(names: Sequence[str], attend: Attend, n_ours: int = 0) -> Iterator[None]:
    """In the current forward context, which must be our own, ``attend`` is the attention of these layers; of the first
    ``n_ours`` tokens, if the context has metadata: these are of the others. With MLA it has none."""
    context = get_forward_context()
    layers = dict(context.no_compile_layers)
    for name in names:
        own: Any = copy(layers[name])
        layers[name] = own
        if keeps_latent(own):
            own.forward_impl = partial(_attend_to_latent, own, attend)
        else:
            own.impl = OwnAttention(own.impl, attend, n_ours)
    context.no_compile_layers = layers
    yield


def rules_of(layer: Any) -> AttentionRules:
    """How tokens attend in one of vLLM's layers; raises Unsupported for what our attention cannot compute."""
    # Other subclasses have rules that only their backends know.
    if type(layer) not in (Attention, ChunkedLocalAttention, MLAAttention):
        raise Unsupported(f"{layer.layer_name} is a {type(layer).__name__}")
    impl, is_quantised = layer.impl, layer.kv_cache_dtype.startswith("fp8")
    rules = AttentionRules(
        heads=layer.num_heads,
        scale=impl.scale,
        window=getattr(layer, "sliding_window", None),
        soft_cap=getattr(impl, "logits_soft_cap", None) or 0.0,
        sinks=getattr(impl, "sinks", None),
        key_scale=_number(layer, layer._k_scale) if is_quantised else 1.0,
        value_scale=_number(layer, layer._v_scale) if is_quantised else 1.0,
    )
    if keeps_latent(layer):
        if layer.use_direct_call or layer.use_sparse or not hasattr(layer, "W_UK_T"):
            raise Unsupported(f"{layer.layer_name} has MLA of a kind whose projections BlendHub does not know")
        return rules._replace(latent=layer.kv_lora_rank, value_scale=rules.key_scale)
    if layer.attn_type != AttentionType.DECODER:
        raise Unsupported(f"{layer.layer_name} is no attention of a decoder, but {layer.attn_type!r}")
    if getattr(impl, "alibi_slopes", None) is not None:
        raise Unsupported(f"{layer.layer_name} has ALiBi")
    if getattr(impl, "chunk_lookback", -1) > -1:
        raise Unsupported(f"{layer.layer_name} attends to the chunks before its own")
    if layer.kv_sharing_target_layer_name is not None:
        raise Unsupported(f"{layer.layer_name} reads the KV of {layer.kv_sharing_target_layer_name}")
    return rules._replace(chunk=getattr(layer, "attention_chunk_size", None))


def _number(layer: Any, scale: torch.Tensor) -> float:
    if scale.numel() > 1:
        raise Unsupported(f"{layer.layer_name} has a scale for each head")
    return float(scale)
