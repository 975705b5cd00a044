"""Models with attention windows under vLLM's hybrid allocator, which keeps few blocks of a layer with a window."""

import json
from pathlib import Path

import pytest

from harness.engines import Engine, disagreement
from harness.engines.shapes import GEMMA3, GPT_OSS
from tests.vllm.conftest import SETTINGS, TOLERANCE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WIDE = ["harness.engines.wide_weights:widen"]


@pytest.fixture(params=[GEMMA3, GPT_OSS], ids=["gemma3", "gpt_oss"])
def start(request, tmp_path):
    """Starts an engine of a model; without settings plain vLLM."""
    path = Path(tmp_path)
    (path / "config.json").write_text(json.dumps(request.param))

    def started(settings=SETTINGS, **options):
        return Engine(path, settings, load_format="dummy", seed=7, arrange=WIDE, **options)

    return started


def test_exact_prefixes_longer_than_the_windows_equal_plain_vllm(start, texts):
    """In steps of 160 tokens: longer than a window, so that vLLM frees blocks in the middle of a prompt."""
    document = texts.new(700)
    prompts = [[*document, *texts.new(n)] for n in (9, 150, 33)]
    with start(None, max_num_batched_tokens=160) as plain:
        expected = plain.ask(*prompts, tokens=100)
        turn = [*prompts[1], *expected[1].tokens, *texts.new(9)]
        expected_turn = plain.one(turn, tokens=9)
    with start(max_num_batched_tokens=160) as engine:
        assert "exact prefixes are reused" in engine.log and "--disable-hybrid-kv-cache-manager" in engine.log
        engine.one(document)
        engine.forget()
        found = engine.ask(*prompts, tokens=100)
        assert [answer.report["exact_tokens"] for answer in found] == [700] * 3
        assert disagreement(found, expected) < TOLERANCE
        engine.forget()
        answered = engine.one(turn, tokens=9)
        # The answer is stored, too, although it is longer than a window.
        assert answered.report["exact_tokens"] >= len(prompts[1]) + 99
        assert disagreement([answered], [expected_turn]) < TOLERANCE
        assert not any(name.startswith(("saves_failed", "loads_failed")) for name in engine.call("counts"))


def test_a_load_that_fails_is_computed_by_vllm(start, texts):
    """vLLM cannot tell from blocks which request has failed: with several block tables it takes the request's name."""
    document = texts.new(300)
    prompts = [[*document, *texts.new(n)] for n in (9, 40)]
    with start() as engine:
        expected = engine.ask(*prompts, tokens=9, mode="off")
        engine.forget()
        engine.call("inside", "tests.vllm.failing_loads:fail_from_now_on")
        found = engine.ask(*prompts, tokens=9)
        assert engine.call("counts")["loads_failed"] == 2
        assert disagreement(found, expected) < TOLERANCE
