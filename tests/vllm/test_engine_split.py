"""One engine computes prompts and another one answers: they exchange KV through one hub."""

import pytest

from harness.engines import Engine, disagreement
from tests.hub.processes import HubProcess
from tests.vllm.conftest import SETTINGS, TOLERANCE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_what_one_engine_computes_another_answers(model, plain, texts, tmp_path):
    hub = HubProcess(tmp_path, arena_gib=0.25)
    settings = SETTINGS | {"endpoint": hub.endpoint, "hub": {}}
    prompts = [texts.new(n) for n in (300, 555, 700)]
    with (
        Engine(model, settings, kv_role="kv_producer") as prefill,
        Engine(model, settings, kv_role="kv_consumer") as decode,
    ):
        prefill.ask(*prompts)
        answers = decode.ask(*prompts, tokens=20)
        assert [answer.report["exact_tokens"] for answer in answers] == [299, 554, 699]
        assert disagreement(answers, [plain.one(prompt, tokens=20) for prompt in prompts]) < TOLERANCE
        # Documents of several prompts in one.
        moved = [*texts.new(20), *prompts[2], *prompts[1], *texts.new(9)]
        blended = decode.one(moved, tokens=4, recompute_ratio=1.0)
        assert blended.report["moved_tokens"] == 1255
        assert disagreement([blended], [plain.one(moved, tokens=4)]) < TOLERANCE
        # Each does its part only.
        prefill.forget()
        assert "this engine stores and reads nothing" in prefill.one(prompts[0]).report["reason"]
        decode.forget()
        decode.one(alone := texts.new(300))
        decode.forget()
        assert decode.one([*alone, *texts.new(9)]).report["exact_tokens"] == 0
    hub.kill()
