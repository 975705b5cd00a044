"""Models with attention windows under vLLM's hybrid allocator, which keeps few blocks of a layer with a window."""

from pathlib import Path
from typing import Any

import pytest

from harness.engines import ONE_THREAD, Engine, disagreement
from harness.engines.shapes import GPT_OSS
from harness.engines.tiny_model import SHAPE
from tests.vllm.arrangements import (
    arrange,
    counted,
    draw_wide_weights,
    fail_loads,
    inside,
    note_forwards,
    prefer_neighbours,
)
from tests.vllm.conftest import PROBING, SETTINGS, TOLERANCE, capacity, drawn, store
from tests.vllm.shapes import GEMMA3, LLAMA4

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WINDOWS_ONLY = SHAPE | {
    "sliding_window": 64,
    "use_sliding_window": True,
    "max_window_layers": 0,
    "layer_types": ["sliding_attention"] * 4,
}
ARRANGED = arrange(draw_wide_weights)
MODELS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "gemma3": (GEMMA3, ARRANGED),
    "gpt_oss, by the device": (GPT_OSS, [*ARRANGED, "by device"]),
    # vLLM frees the blocks of a chunk when the next one begins.
    "chunks of local attention": (LLAMA4, ARRANGED),
    "every layer has a window": (WINDOWS_ONLY, ARRANGED),
}
"""The shape, and how the engine is arranged."""
SMALL_STEPS: dict[str, Any] = {"max_num_batched_tokens": 160}
"""Longer than a window, so that vLLM frees blocks in the middle of a prompt."""


def start(folder: Path, shape: dict, settings: dict | None = SETTINGS, **options: Any) -> Engine:
    """An engine with weights that are drawn; without settings plain vLLM."""
    all_options: dict[str, Any] = {"arrange": ARRANGED, "load_format": "dummy", "seed": 7} | options
    return Engine(drawn(folder, shape), settings, **all_options)


@pytest.fixture(scope="module", params=MODELS.values(), ids=[*MODELS])
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def engine(kind, tmp_path_factory):
    shape, arranged = kind
    with start(tmp_path_factory.mktemp("windows"), shape, arrange=arranged, **SMALL_STEPS) as engine:
        assert ("chosen tokens attend by the device:" in engine.log) == ("by device" in arranged)
        yield engine


@pytest.fixture
def documents(texts):
    """Longer than the windows."""
    return [texts.new(n) for n in (300, 260, 170)]


@pytest.fixture
def prompts(documents, texts):
    """The documents in another order, with other text between."""
    first, second, third = documents
    return [
        [*third, *texts.new(9), *first, *texts.new(70), *second, *texts.new(30)],
        [*texts.new(5), *second, *third, *texts.new(200)],
        [*first[:200], *third, *second[40:]],
    ]


def full_prefill(engine, *prompts, tokens):
    """The answers without reuse, to one prompt after the other."""
    answers = [engine.one(prompt, tokens=tokens, mode="off", store=False) for prompt in prompts]
    engine.forget()
    return answers


def test_exact_prefixes_and_answers_longer_than_the_windows_equal_full_prefill(kind, engine, texts):
    assert "text is reused anywhere" in engine.log and "free blocks hold what has left a window" in engine.log
    document = texts.new(700)
    asked = [[*document, *texts.new(n)] for n in (9, 150, 33)]
    expected = full_prefill(engine, *asked, tokens=100)
    turn = [*asked[1], *expected[1].tokens, *texts.new(9)]
    expected += full_prefill(engine, turn, tokens=9)
    store(engine, document)
    answers = engine.ask(*asked, tokens=100)
    assert [answer.report["exact_tokens"] for answer in answers] == [700] * 3
    engine.forget()
    answers.append(engine.one(turn, tokens=9))
    has_chunks = "attention_chunk_size" in kind[0]
    assert answers[-1].report["exact_tokens"] >= len(asked[1]) + (64 if has_chunks else 99)
    assert disagreement(answers, expected) < TOLERANCE
    # vLLM may free an answer's blocks of local attention before the hub has reserved slots for them.
    failures = {name for name in engine.call("counts") if "failed" in name}
    assert failures <= ({"reservations_failed_DeadlineExceeded"} if has_chunks else set())


def test_everything_recomputed_in_small_steps_equals_full_prefill(engine, documents, prompts):
    """All prompts in the same steps, and one behind a prefix that vLLM has cached itself."""
    store(engine, *documents)
    expected = full_prefill(engine, *prompts, tokens=90)
    together = engine.ask(*prompts, tokens=90, recompute_ratio=1.0, store=False)
    assert all(answer.report["moved_tokens"] == answer.report["recomputed_tokens"] >= 300 for answer in together)
    engine.forget()
    engine.one([*prompts[0][:170], 1], mode="off", store=False)
    behind = engine.one(prompts[0], tokens=90, recompute_ratio=1.0, store=False)
    assert behind.report["engine_tokens"] == 160 and behind.report["moved_tokens"] >= 200
    engine.forget()
    assert disagreement([*together, behind], [*expected, expected[0]]) < TOLERANCE


def test_a_repair_holds_the_blocks_that_leave_a_window_and_the_next_turn_goes_on_from_exact_kv(
    engine, documents, prompts
):
    store(engine, *documents)
    for tokens, asked in ((1, prompts[:1]), (90, prompts)):
        for prompt in asked:
            repaired = engine.one(prompt, tokens=tokens, recompute_ratio=0.0, repair="always", audit=True, store=False)
            assert tokens == 1 or repaired.report["repair"]["exact_from"] < 60
            turn = [*prompt, *repaired.tokens, 5, 6, 7]
            again = engine.one(turn, tokens=20, mode="exact", store=False)
            assert again.report["engine_tokens"] > len(prompt) - 64
            engine.forget()
            assert disagreement([again], full_prefill(engine, turn, tokens=20)) < TOLERANCE


def test_a_load_that_fails_is_computed_by_vllm(engine, texts):
    """vLLM cannot tell from blocks which request has failed: with several block tables it takes the request's name."""
    document = texts.new(300)
    store(engine, document)
    asked = [[*document, *texts.new(9)], [*document, *texts.new(40)], [*texts.new(9), *document, *texts.new(9)]]
    expected = full_prefill(engine, *asked, tokens=9)
    before = engine.call("counts").get("loads_failed", 0)
    inside(engine, fail_loads, True)
    answers = [*engine.ask(*asked[:2], tokens=9), engine.one(asked[2], tokens=9)]
    assert engine.call("counts")["loads_failed"] == before + 3
    assert disagreement(answers, expected) < TOLERANCE
    engine.forget()  # which fails while blocks are borrowed
    inside(engine, fail_loads, False)


def test_a_blend_is_that_of_an_engine_that_keeps_all_blocks(tmp_path, documents, prompts):
    """The selection, the answers, and what is found of the blended KV when the prompt comes again.

    In one thread: with gpt-oss and without the allocator, plain vLLM answers differently each time in two.
    """
    answers = []
    for options in ({}, {"disable_hybrid_kv_cache_manager": True}):
        with start(tmp_path, GPT_OSS, SETTINGS | PROBING, variables=ONE_THREAD, **options) as engine:
            store(engine, *documents)
            answers.append(engine.ask(*prompts, tokens=40))
            engine.forget()
            answers[-1] += engine.ask(*prompts, tokens=40)
            assert not any("failed" in name for name in engine.call("counts"))
    few, whole = answers
    assert [answer.report for answer in few] == [answer.report for answer in whole]
    assert all(answer.report["moved_tokens"] >= 300 for answer in few[:3])
    assert all(answer.report["settled_tokens"] >= 300 for answer in few[3:])
    assert disagreement(few, whole) < TOLERANCE


def test_blocks_come_back_from_requests_that_are_aborted_or_preempted(tmp_path, documents, prompts, texts):
    """vLLM has few blocks, of which all prompts together need more."""
    exact = [[*documents[0][: 64 * n], *texts.new(20)] for n in (1, 2, 3, 4) for _ in range(4)]
    scarce: dict[str, Any] = {"num_gpu_blocks_override": 150, "max_model_len": 900}
    with start(tmp_path, GPT_OSS, None, **scarce) as plain:
        expected, expected_exact = (plain.ask(*asked, tokens=60) for asked in (prompts, exact))
        room = capacity(plain)
    with start(tmp_path, GPT_OSS, **scarce) as few:
        assert "the same as without BlendHub" in few.log and capacity(few) == room
        store(few, *documents)
        for seconds in (0.001, 0.01, 0.03, 0.1):
            few.ask(*prompts, tokens=60, abort_after=seconds, recompute_ratio=0.9, store=False)
            few.forget()
        answers = few.ask(*prompts, tokens=60, recompute_ratio=1.0, store=False)
        assert disagreement(answers, expected) < TOLERANCE
        assert sum(answer.report["moved_tokens"] for answer in answers) > 0
        few.forget()
        assert few.call("counts").get("loads_failed", 0) == 0
        for _ in range(2):  # the second time vLLM's own cache stands in front of what is stored
            assert disagreement(few.ask(*exact, tokens=60), expected_exact) < TOLERANCE
        assert few.call("preemptions") > 0


def test_picks_fill_the_tiles_of_the_engine_s_attention(tmp_path, texts):
    """To that attention each span is a request, which reads its whole context, and a forward has room for few."""
    documents = [texts.new(n) for n in (1400, 1200, 1000)]
    prompt = [*documents[2], *texts.new(9), *documents[0], *texts.new(9), *documents[1], *texts.new(30)]
    computed, spans, forwards = [], [], []
    with start(tmp_path, GPT_OSS, max_model_len=4096, max_num_batched_tokens=4096) as engine:
        store(engine, *documents)
        inside(engine, note_forwards)
        for neighbours in (1, 16):
            inside(engine, prefer_neighbours, neighbours)
            answer = engine.one(prompt, recompute_ratio=0.3, store=False)
            computed.append(answer.report["recomputed_tokens"])
            counts = inside(engine, counted)
            spans.append(counts["spans"])
            forwards.append(counts["forwards"])
            engine.forget()
    assert 0.95 * computed[0] < computed[1] <= computed[0]
    assert 8 * spans[1] < spans[0] and forwards == [2, 1]
