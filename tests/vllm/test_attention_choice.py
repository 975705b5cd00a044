"""By what chosen tokens attend, the device or the engine; and which tokens a selector's question asks about which."""

import logging
from typing import Any

import numpy as np
import pytest
import torch
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl

from blendhub import Span
from blendhub.core.errors import Unsupported
from blendhub.core.spans import Match
from blendhub.vllm.decision import Decision
from blendhub.vllm.model.attention_probe import counted_layers
from blendhub.vllm.model.own_layers import rules_of
from blendhub.vllm.worker.attention_query import attention_query
from blendhub.vllm.worker.start import attention_choice
from blendhub.vllm.worker.start.attention_choice import choose_attention
from tests.stand_in import Anything, StandIn
from tests.vllm.blending import load_job
from tests.vllm.two_ranks import ALONE


class Slow(Anything):
    """A model that is also the clock: a forward takes ``seconds``, and another share of that by the device."""

    max_tokens, max_spans, n_blocks, block_sizes, dtype = 4096, 256, 300, (16,), torch.float32
    layer_names = ("layer",)
    config = StandIn(model_config=StandIn(max_model_len=4096))

    def __init__(self, seconds: float, by_device: float = 0.5, off: float = 0.0) -> None:
        self.seconds, self.by_device, self.now, self.off = seconds, by_device, 0.0, off
        self.attention: Any = ()
        self.can_cut, self.long_span, self.with_long, self.off_with_long = False, None, 1.0, 0.0

    def perf_counter(self):
        return self.now

    def rules(self):
        return self.layer_names

    def forward(self, chosen):
        share = self.with_long if self.long_span else self.by_device if self.attention else 1
        self.now += self.seconds * share
        off = self.off_with_long if self.long_span else self.off if self.attention else 0.0
        return torch.ones(len(chosen), 4) + off


class Attending(Anything):
    """A device."""

    def attention(self, rules, dtype, group):
        return "the device's"


GROUPS: Any = [StandIn(layers=[0])]


@pytest.mark.parametrize("by_device, chosen", [(0.5, True), (2.0, False)])
def test_the_faster_attention_is_chosen_and_the_log_says_both_times(by_device, chosen, monkeypatch, caplog):
    model = Slow(0.1, by_device)
    monkeypatch.setattr(attention_choice, "time", model)
    with caplog.at_level(logging.INFO):
        choose_attention(model, Attending(), GROUPS, 0.01, ALONE)
    assert model.attention == ([(["layer"], "the device's")] if chosen else ())
    assert f"256 of them take {100 * by_device:.1f} ms by the device, and 100.0 ms by the engine" in caplog.text


def test_a_device_that_computes_something_else_is_not_used_and_the_log_says_by_how_much(monkeypatch, caplog):
    model = Slow(0.01, off=0.05)
    monkeypatch.setattr(attention_choice, "time", model)
    choose_attention(model, Attending(), GROUPS, 0.01, ALONE)
    assert model.attention == () and "is off by 5.0% (allowed 1.0%)" in caplog.text


@pytest.mark.parametrize("with_long, off, long_span", [(0.3, 0.0, 256), (0.6, 0.0, None), (0.3, 0.05, None)])
def test_long_spans_attend_by_the_engine_where_that_is_faster_and_right(with_long, off, long_span, monkeypatch, caplog):
    model = Slow(0.1)
    model.can_cut, model.with_long, model.off_with_long, model.max_spans = True, with_long, off, 4096
    monkeypatch.setattr(attention_choice, "time", model)
    with caplog.at_level(logging.INFO):
        choose_attention(model, Attending(), GROUPS, 0.01, ALONE)
    assert model.attention and model.long_span == long_span
    said = "is off by 5.0%" if off else f"take 50.0 ms by the device, and {100 * with_long:.1f} ms by the engine"
    assert said in caplog.text


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


FOUND = Match(Span(0, 30), 1, 0, True), Match(Span(30, 60), 2, 300, False), Match(Span(70, 90), 2, 500, False)
STORED = [Span(0, 60), Span(70, 90)]


@pytest.mark.parametrize(
    "n_found, n_tokens, most, asking, stored",
    [
        (3, 120, 16, [Span(104, 120)], STORED),
        (3, 120, 64, [Span(90, 120)], STORED),
        (3, 91, 8, [Span(63, 70), Span(90, 91)], STORED),
        (2, 61, 16, [Span(45, 61)], [Span(0, 45)]),
        (1, 31, 64, [Span(16, 31)], [Span(0, 16)]),
    ],
    ids=["the question's last tokens", "all of the question", "no question", "all is stored", "half of a short prompt"],
)
def test_the_end_of_a_prompt_asks_what_is_stored_and_neither_holes_nor_itself(n_found, n_tokens, most, asking, stored):
    decision = Decision(5, FOUND[n_found - 1].span.end, FOUND[:n_found], 0.15)
    query = attention_query(load_job(np.zeros(n_tokens, np.uint32), decision), most)
    assert (query.asking.spans, query.stored) == (asking, stored)


def test_layers_of_full_attention_are_asked_where_there_are_some():
    window, full = False, True
    assert counted_layers([0.5, 0.75], [full] * 8) == counted_layers([0.5, 0.75], [window] * 8) == {4, 6}
    assert counted_layers([0.5, 0.75], [window, window, full] * 2) == {2, 5}
