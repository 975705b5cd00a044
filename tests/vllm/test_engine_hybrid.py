"""Models with attention windows under vLLM's hybrid allocator, which keeps few blocks of a layer with a window."""

import json
import re
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


def capacity(engine):
    return re.search(r"KV cache size: ([\d,]+) tokens", engine.log)[1]


def test_exact_prefixes_longer_than_the_windows_equal_plain_vllm(start, texts):
    """In steps of 160 tokens: longer than a window, so that vLLM frees blocks in the middle of a prompt."""
    document = texts.new(700)
    prompts = [[*document, *texts.new(n)] for n in (9, 150, 33)]
    short = texts.new(40)
    with start(None, max_num_batched_tokens=160) as plain:
        expected, capacity_of_plain = plain.ask(*prompts, tokens=100), capacity(plain)
        expected_short = plain.one(short, tokens=9)
        turn = [*prompts[1], *expected[1].tokens, *texts.new(9)]
        expected_turn = plain.one(turn, tokens=9)
    with start(max_num_batched_tokens=160) as engine:
        assert "exact prefixes are reused" in engine.log and "--disable-hybrid-kv-cache-manager" in engine.log
        assert "the same as without BlendHub" in engine.log and capacity(engine) == capacity_of_plain
        engine.one(document)
        engine.forget()
        found = engine.ask(*prompts, tokens=100)
        assert [answer.report["exact_tokens"] for answer in found] == [700] * 3
        assert disagreement(found, expected) < TOLERANCE
        assert disagreement([engine.one(short, tokens=9)], [expected_short]) < TOLERANCE
        engine.forget()
        answered = engine.one(turn, tokens=9)
        # The answer is stored, too, although it is longer than a window.
        assert answered.report["exact_tokens"] >= len(prompts[1]) + 99
        assert disagreement([answered], [expected_turn]) < TOLERANCE
        assert not any(name.startswith(("saves_failed", "loads_failed")) for name in engine.call("counts"))


def test_requests_that_lose_their_blocks_are_loaded_again(start, texts):
    """vLLM has room for a few of them only, and its own prefix cache stands in front of what is stored."""
    document = texts.new(400)
    prompts = [[*document[: 64 * n], *texts.new(20)] for n in range(1, 7)]
    with start() as engine:
        expected = engine.ask(*prompts, tokens=60, mode="off", store=False)
    with start(num_gpu_blocks_override=60, max_model_len=600) as engine:
        engine.one(document)
        engine.forget()
        found = engine.ask(*prompts, tokens=60)
        assert engine.call("preemptions") > 0
        assert disagreement(found, expected) < TOLERANCE
        again = engine.ask(*prompts, tokens=60)
        assert disagreement(again, expected) < TOLERANCE


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
