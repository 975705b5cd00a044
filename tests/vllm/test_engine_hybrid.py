"""Models with attention windows under vLLM's hybrid allocator, which keeps few blocks of a layer with a window."""

import json
from pathlib import Path
from typing import Any

import pytest

from harness.engines import ONE_THREAD, Engine, disagreement
from harness.engines.shapes import DEEPSEEK, GEMMA3, GPT_OSS, LLAMA4
from tests.vllm.arrangements import fail_loads, inside, lend_blocks
from tests.vllm.conftest import ATTENDED, NO_AMX, PROBING, SETTINGS, TOLERANCE, capacity

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WIDE: dict[str, Any] = {"arrange": ["harness.engines.wide_weights:widen"]}
LATENTS: dict[str, Any] = {
    "arrange": ["tests.vllm.windowed_latents:install"],
    # vLLM's rotation for CPUs takes part of a longer vector for a whole one; that in torch does not.
    "compilation_config": {"custom_ops": ["none"]},
    "block_size": 16,
}
WITHOUT_ALLOCATOR: dict[str, Any] = {"disable_hybrid_kv_cache_manager": True}
KEEPING_ALL: dict[str, Any] = {"arrange": ["tests.vllm.windowed_latents:install_keeping_all"]}
MODELS = {
    "gemma3": (GEMMA3, WIDE, WITHOUT_ALLOCATOR, ATTENDED),
    "gpt_oss": (GPT_OSS, WIDE, WITHOUT_ALLOCATOR, PROBING),
    # vLLM frees the blocks of a chunk when the next one begins.
    "chunks of local attention": (LLAMA4, WIDE, WITHOUT_ALLOCATOR, ATTENDED),
    "latents": (DEEPSEEK, LATENTS, KEEPING_ALL, PROBING),
}
"""The shape; vLLM's options; those with which vLLM keeps all blocks; the selector of BlendHub."""


class Model:
    def __init__(self, path: Path, shape: dict, options: dict, keeps_all: dict, selector: dict) -> None:
        (path / "config.json").write_text(json.dumps(shape))
        self._path = path
        self._options = {"load_format": "dummy", "seed": 7, **options}
        self.keeps_all = keeps_all
        self.selector = selector
        self.has_chunks = "attention_chunk_size" in shape
        self.tokens = 40 if keeps_all is KEEPING_ALL else 150  # its attention in plain torch takes long
        self.few_blocks = 150 * 32 // options.get("block_size", 32)

    def start(self, settings: dict | None = SETTINGS, **options: Any) -> Engine:
        """An engine; without settings plain vLLM."""
        return Engine(self._path, settings, **self._options | options)


@pytest.fixture(
    scope="module",
    params=[pytest.param(facts, id=name, marks=[NO_AMX] * (name == "latents")) for name, facts in MODELS.items()],
)
def windows(request, tmp_path_factory):
    """A model with windows."""
    return Model(tmp_path_factory.mktemp("windows"), *request.param)


SMALL_STEPS = {"max_num_batched_tokens": 160}
"""Longer than a window, so that vLLM frees blocks in the middle of a prompt."""


@pytest.fixture(scope="module")
def engine(windows):
    with windows.start(**SMALL_STEPS) as engine:
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


def test_exact_prefixes_longer_than_the_windows_equal_plain_vllm(windows, engine, texts):
    document = texts.new(700)
    asked = [[*document, *texts.new(n)] for n in (9, 150, 33)]
    short = texts.new(40)
    with windows.start(None, **SMALL_STEPS) as plain:
        expected, capacity_of_plain = plain.ask(*asked, tokens=100), capacity(plain)
        expected_short = plain.one(short, tokens=9)
        turn = [*asked[1], *expected[1].tokens, *texts.new(9)]
        expected_turn = plain.one(turn, tokens=9)
    assert "text is reused anywhere" in engine.log and "free blocks hold what has left a window" in engine.log
    assert "the same as without BlendHub" in engine.log and capacity(engine) == capacity_of_plain
    engine.one(document)
    engine.forget()
    answers = engine.ask(*asked, tokens=100)
    assert [answer.report["exact_tokens"] for answer in answers] == [700] * 3
    assert disagreement(answers, expected) < TOLERANCE
    assert disagreement([engine.one(short, tokens=9)], [expected_short]) < TOLERANCE
    engine.forget()
    answered = engine.one(turn, tokens=9)
    # The answer is stored, too, although it is longer than a window.
    assert answered.report["exact_tokens"] >= len(asked[1]) + (64 if windows.has_chunks else 99)
    assert disagreement([answered], [expected_turn]) < TOLERANCE
    check_nothing_failed(windows, engine)


def check_nothing_failed(windows, engine):
    """vLLM may free an answer's blocks of local attention before the hub has reserved slots for them."""
    failures = {name for name in engine.call("counts") if "failed" in name}
    assert failures <= ({"reservations_failed_DeadlineExceeded"} if windows.has_chunks else set())


def store(engine, documents):
    engine.ask(*documents)
    engine.forget()


def full_prefill(engine, prompt, tokens):
    answer = engine.one(prompt, tokens=tokens, mode="off", store=False)
    engine.forget()
    return answer


def check_everything_recomputed(engine, prompts, tokens):
    """All prompts in the same steps, and one behind a prefix that vLLM has cached itself and with an audit."""
    expected = [full_prefill(engine, prompt, tokens) for prompt in prompts]
    together = engine.ask(*prompts, tokens=tokens, recompute_ratio=1.0, store=False)
    assert all(answer.report["moved_tokens"] == answer.report["recomputed_tokens"] >= 300 for answer in together)
    assert disagreement(together, expected) < TOLERANCE
    engine.forget()
    engine.one([*prompts[0][:170], 1], mode="off", store=False)
    behind = engine.one(prompts[0], tokens=tokens, recompute_ratio=1.0, store=False)
    assert behind.report["engine_tokens"] == 160 and behind.report["moved_tokens"] >= 200
    assert disagreement([behind], expected[:1]) < TOLERANCE
    engine.forget()
    audited = engine.one(prompts[0], tokens=tokens, audit=True, store=False)
    assert audited.report["audit"] and disagreement([audited], expected[:1]) < TOLERANCE
    engine.forget()


def test_everything_recomputed_in_small_steps_equals_full_prefill(windows, engine, documents, prompts):
    store(engine, documents)
    check_everything_recomputed(engine, prompts, windows.tokens)


def test_a_blend_is_that_of_an_engine_that_keeps_all_blocks(windows, documents, prompts):
    """The selection, the answers, and what is found of the blended KV when the prompt comes again.

    In one thread: with gpt-oss and without the allocator, plain vLLM answers differently each time in two.
    """
    answers = []
    for options in ({}, windows.keeps_all):
        with windows.start(SETTINGS | windows.selector, variables=ONE_THREAD, **options) as engine:
            store(engine, documents)
            answers.append(engine.ask(*prompts, tokens=40))
            engine.forget()
            answers[-1] += engine.ask(*prompts, tokens=40)
            check_nothing_failed(windows, engine)
            engine.forget()
            if not options:
                check_everything_recomputed(engine, prompts, 40)
    few, whole = answers
    for ours, theirs in zip(few, whole, strict=True):
        assert ours.report == theirs.report, (ours.report, theirs.report)
    assert all(answer.report["moved_tokens"] >= 300 for answer in few[:3])
    assert all(answer.report["settled_tokens"] >= 300 for answer in few[3:])
    assert disagreement(few, whole) < TOLERANCE


def test_a_load_that_fails_is_computed_by_vllm(engine, texts):
    """vLLM cannot tell from blocks which request has failed: with several block tables it takes the request's name."""
    document = texts.new(300)
    asked = [[*document, *texts.new(n)] for n in (9, 40)]
    expected = engine.ask(*asked, tokens=9, mode="off")
    engine.forget()
    before = engine.call("counts").get("loads_failed", 0)
    inside(engine, fail_loads, True)
    answers = engine.ask(*asked, tokens=9)
    assert engine.call("counts")["loads_failed"] == before + 2
    assert disagreement(answers, expected) < TOLERANCE
    moved = [*texts.new(9), *document, *texts.new(9)]
    expected = [full_prefill(engine, moved, 9)]
    assert disagreement([engine.one(moved, tokens=9)], expected) < TOLERANCE
    engine.forget()  # which fails while blocks are borrowed
    inside(engine, fail_loads, False)


def test_a_prompt_for_which_too_few_blocks_are_free_reuses_its_exact_prefix(engine, documents, prompts):
    store(engine, documents)
    inside(engine, lend_blocks, 0.001)
    expected = full_prefill(engine, prompts[0], 30)
    answer = engine.one(prompts[0], tokens=30, explain=True)
    assert answer.report["moved_tokens"] == 0 and answer.report["exact_tokens"] == 170
    assert "too few free blocks" in answer.report["reason"]
    assert disagreement([answer], [expected]) < TOLERANCE
    inside(engine, lend_blocks, None)


def test_blocks_come_back_from_requests_that_are_aborted_or_preempted(windows, engine, documents, prompts, texts):
    """vLLM has few blocks, of which all prompts together need more."""
    exact = [[*documents[0][: 64 * n], *texts.new(20)] for n in (1, 2, 3, 4) for _ in range(4)]
    expected, expected_exact = (engine.ask(*asked, tokens=60, mode="off", store=False) for asked in (prompts, exact))
    with windows.start(num_gpu_blocks_override=windows.few_blocks, max_model_len=900) as few:
        for document in documents:
            few.one(document)
        few.forget()
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
