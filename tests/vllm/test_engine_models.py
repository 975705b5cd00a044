"""Models of many shapes: what can be moved on each is found out when it starts, and who attends for chosen tokens."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from blendhub import Span
from blendhub.vllm.model.recompute_set import positions_of
from harness.engines import Engine, largest_difference
from tests.vllm.arrangements import (
    arrange,
    attend_long_by_engine,
    attend_on_device,
    attention_received,
    fail_builders,
    inside,
)
from tests.vllm.conftest import ATTENDED, NO_AMX, ROUNDING, SETTINGS, check_recomputation, drawn, store
from tests.vllm.shapes import BLOOM, DEEPSEEK, GEMMA3, GEMMA3N, LLAMA, LLAMA4, OPT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

BY_DEVICE = arrange(attend_on_device)
BY_BOTH = arrange(attend_on_device, "12")
"""Spans from 12 tokens on attend by the engine: all documents, and most of what selectors pick."""
OURS = "chosen tokens attend by the device"
LONG_BY_ENGINE = f"(?s){OURS}.*spans of 12 tokens and more attend by the engine's attention: "
THEIRS = "chosen tokens attend by the engine's attention, not by the device: "
KINDS = [
    pytest.param({}, id="by the engine", marks=pytest.mark.versions),
    pytest.param({"arrange": BY_DEVICE, "enforce_eager": False}, id="by the device, compiled"),
    pytest.param({"arrange": BY_BOTH}, id="by both"),
]
MODELS = {
    "stretched rotation": (LLAMA, [], "text is reused anywhere"),
    "two rotations and a window, by both": (GEMMA3, BY_BOTH, LONG_BY_ENGINE),
    "chunks, by both": (LLAMA4, BY_BOTH, LONG_BY_ENGINE),
    "one vector for key and value": (DEEPSEEK, [], "text is reused anywhere"),
    "one vector, by the device": (DEEPSEEK, BY_DEVICE, OURS),
    # vLLM lists its layers in any order.
    "ALiBi": (BLOOM, BY_DEVICE, f"{THEIRS}.* has ALiBi"),
    "the KV of another layer": (GEMMA3N, BY_DEVICE, f"{THEIRS}.* reads the KV of"),
}
"""The shape, how the engine is arranged, and what its log says."""
UNMOVED = {
    "learned positions": (OPT, [], "cannot be moved"),
    # No forward is needed to find out where the latent lies.
    "no metadata": (DEEPSEEK, arrange(fail_builders), "builder failed: ValueError: there is one workspace only"),
}


def params(models: dict[str, Any]) -> list[Any]:
    return [pytest.param(*row, id=name, marks=[NO_AMX] * (row[0] is DEEPSEEK)) for name, row in models.items()]


@pytest.fixture
def start(tmp_path):
    def start(shape, **options):
        # vLLM's rotation for CPUs takes part of a longer vector (MLA) for a whole one; that in torch does not.
        options = {"load_format": "dummy", "compilation_config": {"custom_ops": ["none"]}, **options}
        return Engine(drawn(tmp_path, shape), SETTINGS | ATTENDED, **options)

    return start


def received(path: Path, tokens: list[int], askers: list[Span], stored: list[Span]) -> torch.Tensor:
    """By transformers: a full prefill, then once more those that ask, which do not see what is left out."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    ids, n, asking = torch.tensor([tokens]), len(tokens), torch.from_numpy(positions_of(askers))
    is_stored = torch.zeros(n, dtype=torch.bool)
    is_stored[positions_of(stored)] = True
    positions = torch.cat([torch.arange(n), asking])
    is_seen = torch.cat([is_stored, torch.ones(len(asking), dtype=torch.bool)]) & (positions <= asking[:, None])
    with torch.no_grad():
        kv = model(ids).past_key_values
        mask = torch.zeros(is_seen.shape).masked_fill(~is_seen, -torch.inf)[None, None]
        again = {"position_ids": asking[None], "past_key_values": kv, "attention_mask": mask}
        weights = model(ids[:, asking], output_attentions=True, **again).attentions
    # The depths 0.5 and 0.75 of four layers.
    return sum(weights[layer].sum((0, 1, 2)) for layer in (2, 3))[:n]


@pytest.mark.parametrize("options", KINDS)
def test_who_asks_gets_the_model_s_own_weights_and_everything_recomputed_equals_full_prefill(options, model, texts):
    tokens, askers, stored = texts.new(200), [Span(150, 155), Span(190, 200)], [Span(0, 60), Span(75, 150)]
    with Engine(model, SETTINGS | ATTENDED, **options) as engine:
        assert "text is reused anywhere" in engine.log and (OURS in engine.log) == ("arrange" in options)
        measured = torch.tensor(inside(engine, attention_received, tokens, askers, stored))
        torch.testing.assert_close(measured, received(model, tokens, askers, stored)[:150], rtol=1e-3, atol=1e-5)
        check_recomputation(engine, texts, 150)


def test_long_spans_attend_by_the_engine_beside_short_ones_by_the_device(model, texts):
    """Holes of one forward: what is computed in the second one attends to the first."""
    first, second, third = (texts.new(150) for _ in range(3))
    prompt = [*second, *texts.new(5), *third, *texts.new(40), *first, *texts.new(9)]
    with Engine(model, SETTINGS, arrange=BY_BOTH) as engine:
        store(engine, [*first, *second, *third])
        computed = []
        for long in (12, None, 5):
            inside(engine, attend_long_by_engine, long)
            answer = engine.one(prompt, recompute_ratio=0.0, store=False)
            assert (answer.report["hole_tokens"], answer.report["moved_tokens"]) == (45, 450)
            computed.append(answer.kv(len(prompt) - 1))
            engine.forget()
    assert largest_difference(computed[0], computed[1]) < ROUNDING > largest_difference(computed[2], computed[1])


@pytest.mark.parametrize("shape, arranged, said", params(MODELS))
def test_a_model_whose_keys_turn_or_need_no_turn_is_blended(shape, arranged, said, start, texts):
    # With the hybrid allocator, vLLM does not keep all the KV that is compared here: see test_engine_hybrid.py.
    with start(shape, arrange=arranged, disable_hybrid_kv_cache_manager=True) as engine:
        assert re.search(said, engine.log) and "text is reused anywhere" in engine.log, engine.log[-3000:]
        check_recomputation(engine, texts, 150, 1e-4)


@pytest.mark.parametrize("shape, arranged, reason", params(UNMOVED))
def test_where_keys_cannot_be_moved_exact_prefixes_are_reused(shape, arranged, reason, start, texts):
    document = texts.new(300)
    with start(shape, arrange=arranged) as engine:
        assert reason in engine.log and "exact prefixes are reused" in engine.log
        store(engine, document)
        expected = engine.full_prefill(document)
        exact = engine.one([*document, *texts.new(9)], store=False)
        assert exact.report["exact_tokens"] == 300
        assert largest_difference(exact.kv(299), expected) < ROUNDING
        engine.forget()
        assert engine.one([*texts.new(40), *document, *texts.new(9)]).report["moved_tokens"] == 0
