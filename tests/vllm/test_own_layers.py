"""How the tokens of one of vLLM's layers attend, and the layers whose attention is left to the engine."""

from typing import Any

import pytest
import torch
from vllm.model_executor.layers.attention import Attention, ChunkedLocalAttention, MLAAttention
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl

from blendhub.contracts import AttentionRules
from blendhub.core.errors import Unsupported
from blendhub.vllm.model.own_layers import rules_of
from tests.stand_in import StandIn


def layer(kind=Attention, impl=None, *, kv_cache_dtype="auto", attn_type=AttentionType.DECODER, shared=None, **changes):
    """A layer as vLLM makes it, as far as its rules are read."""
    made = kind.__new__(kind)
    torch.nn.Module.__init__(made)
    made.layer_name, made.num_heads, made.impl = "layers.3.attn", 8, impl or StandIn(scale=0.5)
    made.kv_cache_dtype, made.attn_type, made.kv_sharing_target_layer_name = kv_cache_dtype, attn_type, shared
    for name, value in changes.items():
        setattr(made, name, value)
    return made


LATENT: Any = object.__new__(CPUMLAImpl)
LATENT.scale = 0.5
REFUSED = {
    "is a OfAnotherModel": layer(type("OfAnotherModel", (Attention,), {})),
    "is no attention of a decoder": layer(attn_type=AttentionType.ENCODER_ONLY),
    "has ALiBi": layer(impl=StandIn(scale=0.5, alibi_slopes=torch.ones(8))),
    "attends to the chunks before its own": layer(impl=StandIn(scale=0.5, chunk_lookback=1)),
    "reads the KV of layers.1.attn": layer(shared="layers.1.attn"),
    "has a scale for each head": layer(kv_cache_dtype="fp8", _k_scale=torch.ones(8), _v_scale=torch.ones(8)),
    "has MLA of a kind": layer(MLAAttention, impl=LATENT, use_direct_call=False, use_sparse=True, W_UK_T=None),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_attention_of_other_kinds_is_refused_by_name(reason):
    with pytest.raises(Unsupported, match=rf"layers\.3\.attn {reason}"):
        rules_of(REFUSED[reason])


def test_what_a_layer_says_of_itself():
    assert rules_of(layer()) == AttentionRules(8, 0.5)
    capped = layer(sliding_window=64, impl=StandIn(scale=0.5, logits_soft_cap=30.0))
    assert rules_of(capped) == AttentionRules(8, 0.5, 64, None, 30.0)
    assert rules_of(layer(ChunkedLocalAttention, attention_chunk_size=32)).chunk == 32
    scales = {"_k_scale": torch.tensor(0.5), "_v_scale": torch.tensor([2.0])}
    assert rules_of(layer(kv_cache_dtype="fp8", **scales))[-2:] == (0.5, 2.0)
