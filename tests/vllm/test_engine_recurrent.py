"""A model with recurrent layers: vLLM keeps their state behind some blocks, and prefixes are reused up to there.

vLLM's layers for CPUs answer differently when a prompt is computed in other pieces. So what BlendHub has loaded is
compared with what vLLM's own prefix cache has kept: behind both, the same tokens are computed.
"""

import json
from pathlib import Path

import pytest

from harness.engines import Engine, disagreement
from harness.engines.shapes import LFM2, MAMBA2
from tests.vllm.conftest import SETTINGS, TOLERANCE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WIDE = ["harness.engines.wide_weights:widen"]
BLOCK = 32


@pytest.fixture
def start(tmp_path):
    def start(shape=LFM2, **options):
        (Path(tmp_path) / "config.json").write_text(json.dumps(shape))
        return Engine(Path(tmp_path), SETTINGS, load_format="dummy", seed=7, arrange=WIDE, **options)

    return start


def test_a_prefix_is_reused_up_to_the_last_state_and_answers_are_those_behind_vllms_own_cache(start, texts):
    """In steps of 160 tokens, of which each ends with a state, and with an answer over several blocks."""
    document = texts.new(700)
    prompts = [[*document, *texts.new(n)] for n in (9, 150, 33)]
    with start(enable_prefix_caching=True, max_num_batched_tokens=160) as engine:
        assert "exact prefixes are reused" in engine.log and "with a recurrent state" in engine.log
        answered = engine.one(document, tokens=100)
        whole = [*document, *answered.tokens, *texts.new(9)]
        own = [engine.one(prompt, tokens=40, mode="off", store=False) for prompt in prompts]
        assert [answer.cached for answer in own] == [len(document) // BLOCK * BLOCK] * 3
        engine.forget()
        for prompt, expected in zip(prompts, own, strict=True):
            found = engine.one(prompt, tokens=40, store=False)
            assert found.report["exact_tokens"] == expected.cached
            assert disagreement([found], [expected]) < TOLERANCE
            engine.forget()
        # The states that the answer left behind are stored, too.
        assert engine.one(whole, store=False).report["exact_tokens"] >= len(document) + 100 - 3 * BLOCK
        assert not any(name.startswith(("saves_failed", "loads_failed")) for name in engine.call("counts"))
        engine.forget()
        engine.call("inside", "tests.vllm.failing_loads:fail_from_now_on")
        failed = engine.one(prompts[0], tokens=9, store=False)
        assert engine.call("counts")["loads_failed"] == 1 and len(failed.tokens) == 9


@pytest.mark.parametrize("shape", [LFM2, MAMBA2], ids=["lfm2", "mamba2"])
def test_without_vllms_prefix_cache_there_are_no_states_and_nothing_is_reused(shape, start, texts):
    prompts = [texts.new(n) for n in (200, 333)]
    with start(shape, enable_prefix_caching=False) as engine:
        assert "With --enable-prefix-caching vLLM keeps others" in engine.log
        first = engine.ask(*prompts, tokens=9)
        engine.forget()
        again = engine.ask(*prompts, tokens=9)
        assert disagreement(again, first) < TOLERANCE
        assert all("served without reuse" in answer.report["reason"] for answer in again)
        assert engine.call("counts") == {"refused_model": 4}
