"""What the end of a prompt attends to: measured inside of vLLM, and computed by another implementation of the model."""

from pathlib import Path

import pytest
import torch

from blendhub import Span
from blendhub.vllm.model.recompute_set import positions_of
from harness.engines import Engine
from tests.vllm.arrangements import arrange, attention_received, inside, leave_the_sampler_uncompiled
from tests.vllm.conftest import ATTENDED, ON_THE_SECOND_RUNNER, SETTINGS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

COMPILED = {"enforce_eager": False, "arrange": arrange(leave_the_sampler_uncompiled)}
KINDS = {
    "eager": pytest.param({}, id="eager", marks=pytest.mark.versions),
    "compiled": pytest.param(COMPILED, id="compiled"),
    "second runner": pytest.param(ON_THE_SECOND_RUNNER, id="second runner", marks=pytest.mark.long),
}
LAYERS = (2, 3)
"""Those of the depths 0.5 and 0.75 of four."""


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
    return sum(weights[layer].sum((0, 1, 2)) for layer in LAYERS)[:n]


@pytest.mark.parametrize("options", KINDS.values())
def test_the_weights_of_attention_are_those_of_the_model(options, model, texts):
    tokens, asking, stored = texts.new(200), [Span(150, 155), Span(190, 200)], [Span(0, 60), Span(75, 150)]
    with Engine(model, SETTINGS | ATTENDED, **options) as engine:
        assert "text is reused anywhere" in engine.log, engine.log[-2000:]
        measured = torch.tensor(inside(engine, attention_received, tokens, asking, stored))
        torch.testing.assert_close(measured, received(model, tokens, asking, stored)[:150], rtol=1e-3, atol=1e-5)

        # A request picks by them, and what is left out by the probe is still computed.
        document = texts.new(200)
        engine.one([*texts.new(11), *document])
        engine.forget()
        prompt = [*texts.new(100), *document, *texts.new(20)]
        answer = engine.one(prompt, recompute_ratio=0.15, store=False, explain=True)
        assert answer.report["moved_tokens"] == 200 and answer.report["hole_tokens"] == 100
        assert answer.report["recomputed_tokens"] == 30
        assert len(answer.report["spans"]["recomputed"]) > 15
