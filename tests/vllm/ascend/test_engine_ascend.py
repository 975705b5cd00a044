"""vllm-ascend's attention, and the connector interface of vLLM 0.23, in an engine on a CPU; and ``inside_*.py``."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import hardware_check
from harness.engines import deviation, disagreement
from tests.vllm.conftest import PROBING, SETTINGS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROUNDING = 1e-2
"""bfloat16 computed in another order, as the norm of the difference; with one wrong position it is above 0.1."""
LIKELY = 0.2
"""The tolerance of log-probabilities."""


def test_the_platform_serves_vllm_ascends_own_classes(vllm_023):
    """The files ``inside_*.py``, in one process: what they import takes most of the time."""
    files = sorted(map(str, Path(__file__).parent.glob("inside_*.py")))
    environment = os.environ | vllm_023 | {"VLLM_LOGGING_LEVEL": "ERROR"}
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:]
    assert " skipped" not in done.stdout and " passed" in done.stdout


@pytest.fixture(scope="module")
def engine(vllm_023):
    """An engine, started as `make npu-check` starts it."""
    with hardware_check.engine_of_the_checkout(
        # Chunks that end inside of blocks.
        SETTINGS | PROBING | {"chunk_tokens": 96},
        vllm_023 | {"VLLM_LOGGING_LEVEL": "INFO"},
        prepare=["tests.vllm.ascend.strict_npu", "tests.vllm.ascend.engine_stand_ins"],
        arrange=["tests.vllm.ascend.engine_stand_ins:put_npu_device_in_place"],
        # vLLM's own operators are compiled for another torch.
        compilation_config={"custom_ops": ["none"]},
        num_gpu_blocks_override=120,
        # Longer prompts are computed, and get their blocks, in several steps.
        max_num_batched_tokens=512,
        # vLLM 0.23 cannot do that on a CPU.
        async_scheduling=False,
    ) as engine:
        yield engine


def test_the_start_allows_reuse_anywhere_with_the_plugin_that_is_named_as_the_platform(engine):
    """The check of npu-check, which also compares moved text, finds no difference. Nothing of vLLM is patched."""
    start, blend = hardware_check.rows_of(engine)
    assert start.ok and start.what.startswith("start-up checks passed: text is reused anywhere; embedded hub")
    assert blend.ok and blend.value < ROUNDING
    assert "AscendAttentionBackend serves with vLLM 0.23.0" in engine.log
    lines = [line.partition("device 'npu': ")[2] for line in engine.log.splitlines()]
    assert {"pages are written with atb::_npu_reshape_and_cache", "many copies are submitted at once"} <= {*lines}
    assert engine.call("inside", "tests.vllm.code_of_vllm:not_vllm_s", "blendhub") == []
    # The stand-ins of these tests do replace some of it, so this would show.
    assert engine.call("inside", "tests.vllm.code_of_vllm:not_vllm_s", "tests")


@pytest.mark.parametrize("fate, cached", [("moved", 0), ("exact", 0), ("moved", 128), ("moved", 256)])
def test_everything_recomputed_equals_full_prefill(engine, texts, fate, cached):
    """Behind what vLLM has cached, which may end inside a chunk, positions count from the start of the prompt. Prefix
    caching and chunked prefill stay switched on: the prompt is longer than a step of this engine."""
    first, second = texts.new(400), texts.new(290)
    for stored in [[*second, *first]] if fate == "moved" else [first, second]:
        engine.one(stored)
    engine.forget()
    prompt = [*first, *texts.new(70), *second, *texts.new(4)]
    n = len(prompt) - 1
    expected = engine.full_prefill(prompt)
    if cached:
        engine.one([*first[:cached], *texts.new(3)], mode="off", store=False)
    blended = engine.one(prompt, recompute_ratio=1.0, store=False)
    n_exact, n_moved = (400, 290) if fate == "exact" else (0, 690 - cached)
    fates = [blended.report[f"{kind}_tokens"] for kind in ("engine", "exact", "moved", "hole")]
    assert fates == [cached, n_exact, n_moved, 70]
    assert deviation(blended.kv(n), expected) < ROUNDING
    if fate == "exact" or cached:
        return
    engine.forget()
    moved = engine.one(prompt, recompute_ratio=0.0, store=False).kv(n)
    # The first layer's KV does not depend on the text before: it shows whether keys are rotated correctly.
    assert deviation(moved[0], expected[0]) < ROUNDING < deviation(moved[-1], expected[-1])
    engine.forget()
    # The probe of the first layers sees what the layers write.
    probed = engine.one(prompt, recompute_ratio=0.5, store=False)
    assert probed.report["recomputed_tokens"] == 345
    assert deviation(probed.kv(n), expected) < deviation(moved, expected)


def test_answers_are_stored_though_vllm_saves_nothing_in_steps_without_tokens(engine, texts):
    document = texts.new(300)
    answer = engine.one(document, tokens=140).tokens
    engine.forget()
    again = engine.one([*document, *answer, *texts.new(9)], store=False)
    assert again.report["exact_tokens"] >= 439


def test_fifty_at_once(engine, texts):
    documents = [texts.new(130) for _ in range(6)]
    for document in documents:
        engine.one(document)
    engine.forget()
    pairs = [(documents[n % 6], documents[(n + 1 + n % 4) % 6]) for n in range(50)]
    prompts = [[*first, *texts.new(1 + n % 7), *second, *texts.new(3)] for n, (first, second) in enumerate(pairs)]
    expected = [engine.one(prompt, tokens=2, mode="off", store=False) for prompt in prompts]
    engine.forget()
    together = engine.ask(*prompts, tokens=2, recompute_ratio=1.0, store=False)
    # A late one finds its first document in vLLM's own cache.
    kinds = ("engine_tokens", "exact_tokens", "moved_tokens")
    assert sum(one.report[kind] for one in together for kind in kinds) > 40 * 250
    assert disagreement(together, expected) < LIKELY
