"""Tensor parallel: two ranks, each with half of the heads, that must do the same at the same time."""

import time
from contextlib import suppress
from typing import Any

import pytest

from harness.engines import Engine, disagreement
from harness.engines.shapes import GPT_OSS
from tests.vllm.arrangements import arrange, ranks
from tests.vllm.conftest import ATTENDED, NO_AMX, PROBING, SETTINGS, TOLERANCE, drawn, store
from tests.vllm.shapes import DEEPSEEK, QWEN3

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

RANKS: dict[str, Any] = {
    "tensor_parallel_size": 2,
    "distributed_executor_backend": "mp",
    "variables": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
}


@pytest.fixture(scope="module")
def orders(tmp_path_factory):
    """A folder for orders to the ranks."""
    return tmp_path_factory.mktemp("orders")


@pytest.fixture(scope="module")
def engine(model, orders):
    """Copies to its pages end late, and at another time on each rank."""
    settings = SETTINGS | PROBING
    engine = Engine(model, settings, arrange=arrange(ranks, str(orders)), **RANKS)
    yield engine
    with suppress(RuntimeError):  # a test has ended it
        engine.close()


@pytest.fixture
def prompts(engine, texts):
    """Prompts of two stored documents in another order.

    Each begins with its own text: a late one would find the blended blocks of an early one.
    """
    first, second = texts.new(200), texts.new(200)
    store(engine, [*first, *second])
    return [[*texts.new(7), *second, *texts.new(30 + n), *first, *texts.new(9)] for n in range(3)]


@pytest.fixture
def expected(plain, prompts):
    return [plain.one(prompt, tokens=6) for prompt in prompts]


def test_two_ranks_blend_and_repair_as_one_and_probe_beside_copies_for_which_no_step_waits(
    engine, plain, texts, prompts, expected, orders
):
    assert engine.call("batches_in_flight") == 2
    at_start = len(engine.log)
    for ratio in (1.0, 0.3):
        answers = engine.ask(*prompts, tokens=6, recompute_ratio=ratio, store=False)
        reports = [answer.report for answer in answers]
        told = [(report["moved_tokens"], report["recomputed_tokens"]) for report in reports]
        assert told == [(400, 400 * ratio)] * 3, (reports, engine.log)
        assert ratio < 1 or disagreement(answers, expected) < TOLERANCE
        engine.forget()
    for ratio in (1.0, 0.1):
        repaired = engine.ask(*prompts, tokens=40, recompute_ratio=ratio, repair="always", audit=True, store=False)
        kl = [answer.report["audit"]["kl"] for answer in repaired]
        assert all((number < 1e-5) == (ratio == 1.0) for number in kl), kl
        turns = [[*prompt, *answer.tokens] for prompt, answer in zip(prompts, repaired, strict=True)]
        again = engine.ask(*turns, tokens=4, mode="exact", store=False)
        assert all(answer.report["engine_tokens"] > len(prompts[-1]) - 40 for answer in again)
        assert disagreement(again, [plain.one(turn, tokens=4) for turn in turns]) < TOLERANCE
        engine.forget()
    held = engine.ask(*prompts, tokens=6, recompute_ratio=0.1, doubt=1e6, store=False)
    assert all(answer.report["doubt"]["token"] == 1 for answer in held)
    assert disagreement(held, expected) < TOLERANCE
    engine.forget()
    # Alone, so that it is its own copy beside which it probes.
    alone_at = len(engine.log)
    engine.one(prompts[0], recompute_ratio=0.3, store=False)
    assert "a probe ran beside a copy" in engine.log[alone_at:]
    engine.forget()
    # Both copy what vLLM still has from their blocks. The last 16 tokens that were stored fill none.
    loaded = engine.ask(*prompts, tokens=6, recompute_ratio=0.0, store=False)
    engine.forget()
    documents = [*prompts[0][-209:-9], *prompts[0][7:207], *texts.new(40)]
    engine.one(documents)
    copied = engine.ask(*prompts, tokens=6, recompute_ratio=0.0, store=False)
    assert [answer.report["copied_tokens"] for answer in (*loaded, *copied)] == [0] * 3 + [384] * 3
    assert disagreement(copied, loaded) < TOLERANCE
    engine.forget()
    # What one rank could not copy is computed by all.
    engine.one(documents)
    (orders / "1").write_text("copy")
    answer = engine.one(prompts[0], tokens=6, recompute_ratio=1.0, store=False)
    assert disagreement([answer], expected[:1]) < TOLERANCE
    assert answer.report["moved_tokens"] == 0 and "failed" in answer.report["reason"]
    assert "the engine waited for a copy" not in engine.log[at_start:]
    engine.forget()


def test_a_rank_without_memory_for_a_forward_ends_the_engine_at_once(engine, prompts, orders):
    """The last test of this engine. The other rank would wait in that forward until a timeout of minutes."""
    (orders / "1").write_text("forward")
    started = time.monotonic()
    with pytest.raises(RuntimeError):
        engine.one(prompts[0], recompute_ratio=1.0, store=False)
    assert time.monotonic() - started < 150
    assert "tried to allocate 2 GiB (rank 1 of 2); the engine ends" in engine.log


def test_two_ranks_blend_a_model_with_windows(texts, tmp_path):
    """With vLLM's hybrid allocator: each rank has its heads of what the borrowed blocks hold."""
    documents = [texts.new(n) for n in (300, 260)]
    prompt = [*documents[1], *texts.new(40), *documents[0], *texts.new(30)]
    options = {"load_format": "dummy", "async_scheduling": False, "arrange": arrange(ranks, "", "250")}
    with Engine(drawn(tmp_path, GPT_OSS), SETTINGS | ATTENDED, **RANKS | options) as engine:
        store(engine, *documents)
        expected = engine.one(prompt, tokens=90, mode="off", store=False)
        engine.forget()
        blended = engine.one(prompt, tokens=90, recompute_ratio=1.0, store=False)
        assert blended.report["moved_tokens"] == blended.report["recomputed_tokens"] == 300
        assert disagreement([blended], [expected]) < TOLERANCE
        engine.forget()
        assert engine.one(prompt, recompute_ratio=0.3, store=False).report["recomputed_tokens"] == 90
        engine.forget()


@pytest.mark.parametrize(
    "shape, token_bytes",
    [
        pytest.param(DEEPSEEK, 3 * 576 * 4, id="latent", marks=[NO_AMX, pytest.mark.long]),
        pytest.param(QWEN3 | {"num_key_value_heads": 1}, 3 * 64 * 4, id="head"),
    ],
)
def test_ranks_that_hold_the_same_kv_store_it_once(texts, tmp_path, shape, token_bytes):
    """Exact KV is loaded as it is: each rank reads what the other has written, too."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(drawn(tmp_path, shape | {"initializer_range": 0.3}))
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    # vLLM's rotation for CPUs takes part of a longer vector (MLA) for a whole one; that in torch does not.
    options = {"arrange": arrange(ranks), "compilation_config": {"custom_ops": ["none"]}}
    document = texts.new(600)
    with Engine(tmp_path, SETTINGS, **RANKS | options) as engine:
        assert f": about {2**28 // (256 * token_bytes) * 256:,} tokens of this model" in engine.log
        store(engine, document)
        for prompt, fate in (([*document, *texts.new(9)], "exact"), ([*texts.new(9), *document], "moved")):
            expected = engine.one(prompt, tokens=6, mode="off", store=False)
            engine.forget()
            answer = engine.one(prompt, tokens=6, recompute_ratio=1.0, store=False)
            assert answer.report[f"{fate}_tokens"] in (599, 600)
            assert disagreement([answer], [expected]) < TOLERANCE
            engine.forget()
