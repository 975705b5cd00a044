"""What is reused must be what the model would have computed, as far as it claims to be, and close to it elsewhere."""

import pytest

from harness.engines import Engine, deviation, disagreement, largest_difference
from tests.vllm.arrangements import (
    arrange,
    counted,
    inside,
    leave_the_sampler_uncompiled,
    note_forwards,
)
from tests.vllm.conftest import PROBING, ROUNDING, SETTINGS, TOLERANCE, store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

IN_CHUNKS = {"max_num_batched_tokens": 256, "async_scheduling": False}
COMPILED = {"enforce_eager": False, "arrange": arrange(leave_the_sampler_uncompiled), "enable_prompt_embeds": True}
KINDS = [
    pytest.param(({}, {}), id="eager", marks=pytest.mark.versions),
    pytest.param((PROBING | {"chunk_tokens": 32}, IN_CHUNKS), id="chunk is block, in chunks, one batch at a time"),
    pytest.param((PROBING, COMPILED), id="embedded by the runner, compiled", marks=pytest.mark.long),
    pytest.param(({"chunk_tokens": 96}, {"enable_prefix_caching": False}), id="no cache", marks=pytest.mark.long),
]
"""Settings of BlendHub, and options of vLLM."""


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def engine(kind, model):
    settings, options = kind
    with Engine(model, SETTINGS | settings, **options) as engine:
        # Otherwise nothing of this file would say what asynchronous scheduling does, which is the default on GPUs.
        assert engine.call("batches_in_flight") == (2 if options.get("async_scheduling", True) else 1)
        yield engine


@pytest.fixture(scope="module")
def plain(kind, model, plain):
    """vLLM with the same options: engines of different kinds round differently, and how depends on the processor."""
    _, options = kind
    if not options:
        yield plain
        return
    with Engine(model, **options) as same_kind:
        yield same_kind


def difference(answer, plain, prompt, n):
    """How far the KV of a prompt's first tokens is from that of plain vLLM."""
    return largest_difference(answer.kv(n), plain.one(prompt).kv(n))


def test_everything_recomputed_equals_full_prefill(engine, plain, texts):
    first, second, third = texts.new(300), texts.new(130), texts.new(300)
    store(engine, [*first, *second, *third])
    prompt = [*third, *texts.new(37), *first, *second, *texts.new(20)]
    blended = engine.one(prompt, recompute_ratio=1.0, store=False)
    assert blended.report["moved_tokens"] == blended.report["recomputed_tokens"] == 730
    assert difference(blended, plain, prompt, len(prompt) - 1) < ROUNDING
    assert disagreement([blended], [plain.one(prompt)]) < TOLERANCE
    # And behind what vLLM has in its own cache, which ends inside a document.
    engine.forget()
    engine.one(prompt[:200], mode="off", store=False)
    blended = engine.one(prompt, recompute_ratio=1.0, store=False)
    assert blended.report["moved_tokens"] > 500
    assert difference(blended, plain, prompt, len(prompt) - 1) < ROUNDING


def test_requests_that_blend_together_equal_full_prefill(kind, engine, plain, texts):
    first, second = texts.new(150), texts.new(130)
    store(engine, [*first, *second])
    prompts = [[*texts.new(20 + 40 * number), *second, *texts.new(7), *first, *texts.new(9)] for number in range(4)]
    inside(engine, note_forwards)
    # The default selector picks windows, and leaves the rest of its budget that is shorter than one.
    for ratio, least in ((0.5, 140 if "selector" in kind[0] else 129), (1.0, 280)):
        blended = engine.ask(*prompts, recompute_ratio=ratio, store=False, keep_kv=True)
        # One of vLLM's steps plans the loads of several.
        assert inside(engine, counted)["most requests"] > 1
        for answer, prompt in zip(blended, prompts, strict=True):
            assert answer.report["moved_tokens"] == 280
            assert least <= answer.report["recomputed_tokens"] <= 280 * ratio
            n = len(prompt) - 1 if ratio == 1 else 20  # which is a hole
            assert difference(answer, plain, prompt, n) < ROUNDING
        engine.forget()


def test_exact_text_and_holes_equal_full_prefill_and_moved_keys_are_turned(engine, plain, texts):
    prefix, document = texts.new(500), texts.new(300)
    stored = engine.one([*texts.new(11), *document, *texts.new(5)]).kv(311)[:, :, 11:]
    store(engine, [*prefix, *texts.new(10)])
    prompt = [*prefix, *texts.new(77), *document, *texts.new(9)]
    blended = engine.one(prompt, recompute_ratio=0.0, store=False)
    fates = ("exact_tokens", "hole_tokens", "moved_tokens", "recomputed_tokens")
    assert [blended.report[fate] for fate in fates] == [500, 77, 300, 0]
    ours, expected = blended.kv(877), plain.one(prompt).kv(877)
    assert largest_difference(ours[:, :, :577], expected[:, :, :577]) < ROUNDING
    # In the first layer keys and values depend on the token and its position alone.
    for part in (0, 1):
        assert largest_difference(ours[0, part, 577:], expected[0, part, 577:]) < ROUNDING
    assert (ours[:, 1, 577:] == stored[:, 1]).all()


def test_ordinary_requests_never_see_what_was_blended(engine, plain, texts):
    first, second = texts.new(300), texts.new(300)
    store(engine, [*first, *second])
    prompt = [*second, *first, *texts.new(70)]
    # Its answer fills one of vLLM's blocks.
    blended = engine.one(prompt, tokens=10, recompute_ratio=0.0, store=False)
    assert blended.report["moved_tokens"] == 600
    blended_kv = blended.kv(len(prompt) - 1)
    ordinary = engine.one(prompt, tokens=10, mode="off", store=False)
    assert ordinary.report["engine_tokens"] == 0
    plain.forget()
    expected = plain.one(prompt, tokens=10)
    assert (ordinary.kv(len(prompt) - 1) == expected.kv(len(prompt) - 1)).all()
    assert ordinary.tokens == expected.tokens
    # A prompt that goes on where the blended answer ended finds nothing of it in vLLM's cache either.
    goes_on = [*prompt, *blended.tokens, *texts.new(9)]
    assert engine.one(goes_on, mode="off", store=False).report["engine_tokens"] <= len(prompt)
    assert deviation(blended_kv, expected.kv(len(prompt) - 1)) > 0.1


def test_aborted_while_blending(engine, texts):
    first, second = texts.new(700), texts.new(700)
    store(engine, [*first, *second])
    prompts = [[*second, *texts.new(9), *first, *texts.new(9)] for _ in range(6)]
    for seconds in (0.0, 0.02, 0.1):
        engine.ask(*prompts, abort_after=seconds, recompute_ratio=0.9)
    # Blocks that were still held would keep the cache from being emptied.
    engine.forget()
    assert engine.one(prompts[0], recompute_ratio=0.5).report["moved_tokens"] > 1000


@pytest.mark.parametrize("kind", [KINDS[1]], indirect=True)
def test_the_more_is_recomputed_the_closer_and_what_deviates_before_all(kind, engine, model, plain, texts):
    documents = [texts.new(200) for _ in range(5)]
    prompt = [token for document in reversed(documents) for token in [*texts.new(20), *document]]
    expected = plain.one(prompt).kv(len(prompt) - 1)

    def deviations(engine, *ratios):
        store(engine, [token for document in documents for token in document])
        for ratio in ratios:
            yield deviation(engine.one(prompt, recompute_ratio=ratio, store=False).kv(expected.shape[2]), expected)
            engine.forget()

    by_deviation = list(deviations(engine, 0.0, 0.05, 0.15, 0.5, 0.9, 1.0))
    assert by_deviation == sorted(by_deviation, reverse=True)
    assert by_deviation[-1] < ROUNDING < by_deviation[-2]
    with Engine(model, SETTINGS | {"selector": {"name": "first_k", "options": {"k": 0}}}) as by_place:
        less, more = deviations(by_place, 0.15, 0.5)
    assert by_deviation[2] < less and by_deviation[3] < more
