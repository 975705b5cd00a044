"""A model with MLA under vLLM's hybrid allocator, which keeps few blocks of the layers with a window."""

import json
from pathlib import Path
from typing import Any

import pytest

from harness.engines import Engine, disagreement
from harness.engines.shapes import DEEPSEEK
from tests.vllm.conftest import PROBING, SETTINGS, TOLERANCE
from tests.vllm.test_engine_hybrid import capacity, check_recomputed, served

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif("amx_tile" in Path("/proc/cpuinfo").read_text(), reason="vLLM's MLA for AMX needs bfloat16"),
]


@pytest.fixture
def start(tmp_path):
    """Starts an engine; without settings plain vLLM."""
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK))
    # vLLM's rotation for CPUs takes part of a longer vector for a whole one; that in torch does not.
    options: dict[str, Any] = {
        "load_format": "dummy",
        "seed": 7,
        "compilation_config": {"custom_ops": ["none"]},
        "block_size": 16,
    }

    def started(settings=SETTINGS, install="install", **others):
        windows = [f"tests.vllm.windowed_latents:{install}"]
        return Engine(tmp_path, settings, arrange=windows, **options, **others)

    return started


def test_exact_prefixes_and_capacity_are_those_of_plain_vllm(start, texts):
    document = texts.new(500)
    prompts = [[*document, *texts.new(n)] for n in (9, 150)]
    with start(None, max_num_batched_tokens=160) as plain:
        expected, capacity_of_plain = plain.ask(*prompts, tokens=80), capacity(plain)
    with start(max_num_batched_tokens=160) as engine:
        assert "text is reused anywhere" in engine.log and "free blocks hold what has left a window" in engine.log
        assert capacity(engine) == capacity_of_plain
        engine.one(document)
        engine.forget()
        found = engine.ask(*prompts, tokens=80)
        assert [answer.report["exact_tokens"] for answer in found] == [500] * 2
        assert disagreement(found, expected) < TOLERANCE
        assert not any(name.startswith(("saves_failed", "loads_failed")) for name in engine.call("counts"))


@pytest.mark.parametrize("steps", [{}, {"max_num_batched_tokens": 160}], ids=["large steps", "small steps"])
def test_everything_recomputed_equals_full_prefill(start, texts, steps):
    documents, prompts = served(texts)
    with start(**steps) as engine:
        engine.ask(*documents)
        engine.forget()
        check_recomputed(engine, prompts, 40)


def test_a_blend_is_that_of_an_engine_that_keeps_all_blocks(start, texts):
    documents, prompts = served(texts)
    answers = []
    for install in ("install", "install_keeping_all"):
        with start(SETTINGS | PROBING, install) as engine:
            engine.ask(*documents)
            engine.forget()
            answers.append(engine.ask(*prompts, tokens=20))
    windows, whole = answers
    assert [one.report for one in windows] == [one.report for one in whole]
    assert all(answer.report["moved_tokens"] >= 300 for answer in windows)
    assert disagreement(windows, whole) < TOLERANCE
