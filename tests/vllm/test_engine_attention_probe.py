"""What the end of a prompt attends to: measured inside of vLLM, and computed apart from it."""

import pytest
import torch

from blendhub import Span
from harness.engines import Engine
from tests.vllm.attended_by_hand import computed
from tests.vllm.conftest import ATTENDED, ON_THE_SECOND_RUNNER, SETTINGS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

COMPILED = {"enforce_eager": False, "arrange": ["tests.vllm.uncompiled_sampler:arrange"]}
KINDS = {
    "eager": pytest.param({}, id="eager", marks=pytest.mark.versions),
    "compiled": pytest.param(COMPILED, id="compiled"),
    "second runner": pytest.param(ON_THE_SECOND_RUNNER, id="second runner", marks=pytest.mark.long),
}
LAYERS = {2, 3}
"""Those of the depths 0.5 and 0.75 of four."""


@pytest.mark.parametrize("options", KINDS.values())
def test_the_weights_of_attention_are_those_of_the_model(options, model, texts):
    tokens, asking, stored = texts.new(200), [Span(150, 155), Span(190, 200)], [Span(0, 60), Span(75, 150)]
    with Engine(model, SETTINGS | ATTENDED, **options) as engine:
        assert "text is reused anywhere" in engine.log, engine.log[-2000:]
        found = torch.tensor(engine.call("inside", "tests.vllm.attended_by_hand:probed", tokens, asking, stored))
        expected = computed(model, tokens, asking, stored, LAYERS)[:150]
        expected[60:75] = 0
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)

        # A request picks by them, and what is left out by the probe is still computed.
        document = texts.new(200)
        engine.one([*texts.new(11), *document])
        engine.forget()
        prompt = [*texts.new(100), *document, *texts.new(20)]
        answer = engine.one(prompt, recompute_ratio=0.15, store=False, explain=True)
        assert answer.report["moved_tokens"] == 200 and answer.report["hole_tokens"] == 100
        assert answer.report["recomputed_tokens"] == 30
        assert len(answer.report["spans"]["recomputed"]) > 15
