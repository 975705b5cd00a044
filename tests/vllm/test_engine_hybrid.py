"""Models with attention windows under vLLM's hybrid allocator, which keeps few blocks of a layer with a window."""

import json
import re

import pytest

from harness.engines import ONE_THREAD, Engine, disagreement
from harness.engines.shapes import GEMMA3, GPT_OSS, LLAMA4
from tests.vllm.conftest import PROBING, SETTINGS, TOLERANCE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WIDE = ["harness.engines.wide_weights:widen"]


@pytest.fixture(scope="module", params=[GEMMA3, GPT_OSS], ids=["gemma3", "gpt_oss"])
def start(request, tmp_path_factory):
    """Starts an engine of a model; without settings plain vLLM."""
    path = tmp_path_factory.mktemp("windows")
    (path / "config.json").write_text(json.dumps(request.param))

    def started(settings=SETTINGS, **options):
        return Engine(path, settings, load_format="dummy", seed=7, arrange=WIDE, **options)

    return started


@pytest.fixture(scope="module")
def engine(start):
    with start() as engine:
        yield engine


@pytest.fixture(scope="module")
def in_small_steps(start):
    """An engine whose steps are longer than a window, so that vLLM frees blocks in the middle of a prompt."""
    with start(max_num_batched_tokens=160) as engine:
        yield engine


def capacity(engine):
    return re.search(r"KV cache size: ([\d,]+) tokens", engine.log)[1]


def test_exact_prefixes_longer_than_the_windows_equal_plain_vllm(start, in_small_steps, texts):
    document = texts.new(700)
    prompts = [[*document, *texts.new(n)] for n in (9, 150, 33)]
    short = texts.new(40)
    with start(None, max_num_batched_tokens=160) as plain:
        expected, capacity_of_plain = plain.ask(*prompts, tokens=100), capacity(plain)
        expected_short = plain.one(short, tokens=9)
        turn = [*prompts[1], *expected[1].tokens, *texts.new(9)]
        expected_turn = plain.one(turn, tokens=9)
    engine = in_small_steps
    assert "text is reused anywhere" in engine.log and "free blocks hold what has left a window" in engine.log
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


def test_requests_that_lose_their_blocks_are_loaded_again(start, engine, texts):
    """vLLM has room for a few of them only, and its own prefix cache stands in front of what is stored."""
    document = texts.new(400)
    prompts = [[*document[: 64 * n], *texts.new(20)] for n in range(1, 7)]
    expected = engine.ask(*prompts, tokens=60, mode="off", store=False)
    with start(num_gpu_blocks_override=60, max_model_len=600) as engine:
        engine.one(document)
        engine.forget()
        found = engine.ask(*prompts, tokens=60)
        assert engine.call("preemptions") > 0
        assert disagreement(found, expected) < TOLERANCE
        again = engine.ask(*prompts, tokens=60)
        assert disagreement(again, expected) < TOLERANCE


def test_a_load_that_fails_is_computed_by_vllm(engine, texts):
    """vLLM cannot tell from blocks which request has failed: with several block tables it takes the request's name."""
    document = texts.new(300)
    prompts = [[*document, *texts.new(n)] for n in (9, 40)]
    expected = engine.ask(*prompts, tokens=9, mode="off")
    engine.forget()
    engine.call("inside", "tests.vllm.failing_loads:fail_from_now_on")
    found = engine.ask(*prompts, tokens=9)
    assert engine.call("counts")["loads_failed"] == 2
    assert disagreement(found, expected) < TOLERANCE
    moved = [*texts.new(9), *document, *texts.new(9)]
    expected = engine.one(moved, tokens=9, mode="off", store=False)
    engine.forget()
    assert disagreement([engine.one(moved, tokens=9)], [expected]) < TOLERANCE
    engine.forget()  # which fails while blocks are borrowed
    engine.call("inside", "tests.vllm.failing_loads:load_again")


def served(texts):
    """Documents longer than the windows, and prompts that have them in another order, with other text between."""
    documents = [texts.new(n) for n in (300, 260, 170)]
    first, second, third = documents
    prompts = [
        [*third, *texts.new(9), *first, *texts.new(70), *second, *texts.new(30)],
        [*texts.new(5), *second, *third, *texts.new(200)],
        [*first[:200], *third, *second[40:]],
    ]
    return documents, prompts


@pytest.mark.parametrize("small", [False, True], ids=["large steps", "small steps"])
def test_everything_recomputed_equals_full_prefill(engine, in_small_steps, texts, small):
    """One prompt after the other, all in the same steps, and behind a prefix that vLLM has cached itself."""
    engine = in_small_steps if small else engine
    documents, prompts = served(texts)
    engine.ask(*documents)
    engine.forget()
    expected = []
    for prompt in prompts:
        expected.append(engine.one(prompt, tokens=150, mode="off", store=False))
        engine.forget()
        found = engine.one(prompt, tokens=150, recompute_ratio=1.0, store=False)
        assert found.report["moved_tokens"] == found.report["recomputed_tokens"] >= 300
        assert disagreement([found], expected[-1:]) < TOLERANCE
        engine.forget()
    together = engine.ask(*prompts, tokens=150, recompute_ratio=1.0, store=False)
    assert all(answer.report["moved_tokens"] >= 300 for answer in together)
    assert disagreement(together, expected) < TOLERANCE
    engine.forget()
    for prompt, full in zip(prompts, expected, strict=True):
        engine.one([*prompt[:170], 1], mode="off", store=False)
        behind = engine.one(prompt, tokens=150, recompute_ratio=1.0, store=False)
        assert behind.report["engine_tokens"] == 160 and behind.report["moved_tokens"] >= 200
        assert disagreement([behind], [full]) < TOLERANCE
        engine.forget()
    audited = engine.one(prompts[0], tokens=150, audit=True, store=False)
    assert audited.report["audit"] and disagreement([audited], expected[:1]) < TOLERANCE
    engine.forget()


def check_recomputed(engine, prompts, tokens):
    """All prompts in the same steps, and one behind a prefix that vLLM has cached itself."""
    expected = []
    for prompt in prompts:
        expected.append(engine.one(prompt, tokens=tokens, mode="off", store=False))
        engine.forget()
    together = engine.ask(*prompts, tokens=tokens, recompute_ratio=1.0, store=False)
    assert all(answer.report["moved_tokens"] >= 300 for answer in together)
    assert disagreement(together, expected) < TOLERANCE
    engine.forget()
    engine.one([*prompts[0][:170], 1], mode="off", store=False)
    behind = engine.one(prompts[0], tokens=tokens, recompute_ratio=1.0, store=False)
    assert behind.report["engine_tokens"] == 160 and behind.report["moved_tokens"] >= 200
    assert disagreement([behind], expected[:1]) < TOLERANCE


@pytest.mark.parametrize("steps", [{}, {"max_num_batched_tokens": 160}], ids=["large steps", "small steps"])
def test_chunks_of_local_attention_are_reused_as_windows_are(tmp_path, texts, steps):
    """Of Llama 4: vLLM frees the blocks of a chunk when the next one begins."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA4))
    documents, prompts = served(texts)
    with Engine(tmp_path, SETTINGS, load_format="dummy", seed=7, arrange=WIDE, **steps) as engine:
        assert "text is reused anywhere" in engine.log and "with chunks of 64" in engine.log
        engine.ask(*documents)
        engine.forget()
        going_on = [*documents[0], *texts.new(70)]
        expected = [engine.one(going_on, tokens=90, mode="off", store=False)]
        engine.forget()
        exact = engine.one(going_on, tokens=90, store=False)
        assert exact.report["exact_tokens"] == len(documents[0])
        assert disagreement([exact], expected) < TOLERANCE
        engine.forget()
        check_recomputed(engine, prompts, 90)


@pytest.mark.parametrize("selector", [{}, PROBING], ids=["attended", "probing"])
def test_a_blend_is_that_of_an_engine_without_the_allocator(start, texts, selector):
    """The selection, the answers, and what is found of the blended KV when the prompt comes again.

    In one thread: with gpt-oss and without the allocator, plain vLLM answers differently each time in two.
    """
    documents, prompts = served(texts)
    answers = []
    for options in ({}, {"disable_hybrid_kv_cache_manager": True}):
        with start(SETTINGS | selector, variables=ONE_THREAD, **options) as engine:
            engine.ask(*documents)
            engine.forget()
            answers.append(engine.ask(*prompts, tokens=40))
            engine.forget()
            answers[-1] += engine.ask(*prompts, tokens=40)
            assert not any(name.startswith(("saves_failed", "reservations_failed")) for name in engine.call("counts"))
    windows, whole = answers
    for one, other in zip(windows, whole, strict=True):
        assert one.report == other.report, (one.report, other.report)
    assert all(answer.report["moved_tokens"] >= 300 for answer in windows[:3])
    assert all(answer.report["settled_tokens"] >= 300 for answer in windows[3:])
    assert disagreement(windows, whole) < TOLERANCE


def test_borrowed_blocks_come_back_when_requests_are_aborted_or_preempted(start, engine, texts):
    """vLLM has few blocks, of which all prompts together need more."""
    documents, prompts = served(texts)
    expected = engine.ask(*prompts, tokens=60, mode="off", store=False)
    with start(num_gpu_blocks_override=150, max_model_len=900) as engine:
        for document in documents:
            engine.one(document)
        engine.forget()
        for seconds in (0.001, 0.01, 0.03, 0.1):
            engine.ask(*prompts, tokens=60, abort_after=seconds, recompute_ratio=0.9, store=False)
            engine.forget()
        found = engine.ask(*prompts, tokens=60, recompute_ratio=1.0, store=False)
        assert disagreement(found, expected) < TOLERANCE
        assert sum(answer.report["moved_tokens"] for answer in found) > 0
        engine.forget()
        assert engine.call("counts").get("loads_failed", 0) == 0


def test_a_prompt_for_which_too_few_blocks_are_free_reuses_its_exact_prefix(engine, texts):
    documents, prompts = served(texts)
    engine.ask(*documents)
    engine.forget()
    usual = engine.call("inside", "tests.vllm.few_blocks:lend", 0.001)
    expected = engine.one(prompts[0], tokens=30, mode="off", store=False)
    engine.forget()
    found = engine.one(prompts[0], tokens=30, explain=True)
    assert found.report["moved_tokens"] == 0 and found.report["exact_tokens"] == 170
    assert "too few free blocks" in found.report["reason"]
    assert disagreement([found], [expected]) < TOLERANCE
    engine.call("inside", "tests.vllm.few_blocks:lend", usual)
