"""vllm-ascend's attention, and the connector interface of vLLM 0.23, in an engine on a CPU."""

import pytest

from benchmarks import engine_check
from harness.engines import deviation, disagreement
from tests.vllm.conftest import PROBING, SETTINGS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROUNDING = 1e-2
"""bfloat16 computed in another order, as the norm of the difference; with one wrong position it is above 0.1."""
LIKELY = 0.2
"""The tolerance of log-probabilities."""


@pytest.fixture(scope="module")
def engine(vllm_023):
    """An engine, started as `make npu-check` starts it."""
    with engine_check.engine_of_the_checkout(
        # Chunks that end inside of blocks.
        SETTINGS | PROBING | {"chunk_tokens": 96},
        vllm_023 | {"VLLM_LOGGING_LEVEL": "INFO"},
        prepare=["tests.vllm.ascend.strict_npu", "tests.vllm.ascend.engine_stand_ins"],
        arrange=["tests.vllm.ascend.npu_device:put_in_place"],
        # vLLM's own operators are compiled for another torch.
        compilation_config={"custom_ops": ["none"]},
        num_gpu_blocks_override=120,
        # Longer prompts are computed, and get their blocks, in several steps.
        max_num_batched_tokens=512,
        # vLLM 0.23 cannot do that on a CPU.
        async_scheduling=False,
    ) as engine:
        yield engine


def test_the_checks_at_the_start_let_text_be_reused_anywhere(engine, texts):
    engine.one(texts.new(9))  # the line is logged once the hub is reached
    assert "AscendAttentionBackend serves with vLLM 0.23.0" in engine.log
    assert "text is reused anywhere" in engine.log


def test_the_device_is_the_plugin_that_is_named_as_the_platform(engine):
    """No settings name it, and it writes pages with the operators of an Atlas A2."""
    lines = [line.partition("device 'npu': ")[2] for line in engine.log.splitlines() if "device 'npu': " in line]
    assert "pages are written with atb::_npu_reshape_and_cache" in lines
    assert "many copies are submitted at once" in lines


def test_npu_check_reads_the_line_of_the_start_and_compares_moved_text(engine):
    start, blend = engine_check.rows_of(engine)
    assert start.ok and start.what.startswith(
        "start-up checks passed: text is reused anywhere; embedded hub in a process; arena "
    )
    assert blend.ok and blend.value < ROUNDING


def test_vllm_is_not_patched(engine, texts):
    """The hole mode of others runs with a part of the engine's start commented out."""
    engine.one(texts.new(40))
    assert engine.call("inside", "tests.vllm.code_of_vllm:not_vllm_s", "blendhub") == []
    # The stand-ins of these tests do replace some of it, so this would show.
    assert engine.call("inside", "tests.vllm.code_of_vllm:not_vllm_s", "tests")


def test_prefix_caching_and_chunked_prefill_stay_switched_on(engine, texts):
    """The hole mode of others switches both off."""
    switched_on = engine.call("inside", "tests.vllm.ascend.npu_device:what_vllm_has_switched_on")
    assert switched_on == {"prefix caching": True, "chunked prefill": True}
    document, beginning = texts.new(300), texts.new(256)
    engine.one(document)
    engine.forget()
    engine.one([*beginning, *texts.new(3)], mode="off", store=False)
    # Longer than a step of this engine.
    answer = engine.one([*beginning, *texts.new(20), *document, *texts.new(600)], store=False)
    assert answer.report["engine_tokens"] == 256 and answer.report["moved_tokens"] == 300


def test_everything_recomputed_equals_full_prefill(engine, texts):
    first, second = texts.new(300), texts.new(290)
    engine.one([*first, *second])
    engine.forget()
    prompt = [*second, *texts.new(5), *first, *texts.new(4)]
    n = len(prompt) - 1
    expected = engine.full_prefill(prompt)
    blended = engine.one(prompt, recompute_ratio=1.0, store=False)
    assert blended.report["moved_tokens"] == blended.report["recomputed_tokens"] == 590
    assert deviation(blended.kv(n), expected) < ROUNDING
    engine.forget()
    moved = engine.one(prompt, recompute_ratio=0.0, store=False).kv(n)
    # The first layer's KV does not depend on the text before: it shows whether keys are rotated correctly.
    assert deviation(moved[0], expected[0]) < ROUNDING < deviation(moved[-1], expected[-1])
    engine.forget()
    # The probe of the first layers sees what the layers write.
    probed = engine.one(prompt, recompute_ratio=0.5, store=False)
    assert probed.report["recomputed_tokens"] == 295
    assert deviation(probed.kv(n), expected) < deviation(moved, expected)


def test_an_exact_prefix_and_a_hole(engine, texts):
    first, second = texts.new(300), texts.new(290)
    engine.one(first)
    engine.one(second)
    engine.forget()
    prompt = [*first, *texts.new(70), *second, *texts.new(4)]
    n = len(prompt) - 1
    expected = engine.full_prefill(prompt)
    blended = engine.one(prompt, recompute_ratio=1.0, store=False)
    assert blended.report["exact_tokens"] == 300 and blended.report["hole_tokens"] == 70
    assert deviation(blended.kv(n), expected) < ROUNDING


@pytest.mark.parametrize("cached", [128, 256])
def test_a_cached_prefix_that_ends_inside_a_chunk(engine, texts, cached):
    """The positions of what is loaded count from the start of the prompt, not from the end of what is cached."""
    first, second = texts.new(400), texts.new(290)
    engine.one([*second, *first])
    engine.forget()
    prompt = [*first, *texts.new(9), *second, *texts.new(4)]
    n = len(prompt) - 1
    expected = engine.full_prefill(prompt)
    engine.one([*first[:cached], *texts.new(3)], mode="off", store=False)
    blended = engine.one(prompt, recompute_ratio=1.0, store=False)
    assert blended.report["engine_tokens"] == cached
    assert deviation(blended.kv(n), expected) < ROUNDING


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
    prompts = [
        [*documents[n % 6], *texts.new(1 + n % 7), *documents[(n + 1 + n % 4) % 6], *texts.new(3)] for n in range(50)
    ]
    expected = [engine.one(prompt, tokens=2, mode="off", store=False) for prompt in prompts]
    engine.forget()
    together = engine.ask(*prompts, tokens=2, recompute_ratio=1.0, store=False)
    # A late one finds its first document in vLLM's own cache.
    kinds = ("engine_tokens", "exact_tokens", "moved_tokens")
    assert sum(one.report[kind] for one in together for kind in kinds) > 40 * 250
    assert disagreement(together, expected) < LIKELY
