"""Models with recurrent layers whose text moves: what prompts repeat becomes segments, over which states go by maps."""

from typing import Any

import pytest

from blendhub.vllm.scheduler.segments import SEAM_TOKENS, TAIL_TOKENS
from harness.engines import Engine, disagreement
from harness.engines.shapes import GRANITE4, LFM2, QWEN3_NEXT
from tests.hub.processes import HubProcess
from tests.vllm.arrangements import (
    arrange,
    draw_wide_weights,
    error_of_states,
    fail_loads,
    inside,
    note_states,
    ranks,
)
from tests.vllm.conftest import SETTINGS, drawn
from tests.vllm.shapes import KIMI_LINEAR
from tests.vllm.test_engine_ranks import RANKS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MOVING = SETTINGS | {"policy": SETTINGS["policy"] | {"moves_states": True}}
OPTIONS: dict[str, Any] = {"load_format": "dummy", "seed": 7, "enable_prefix_caching": True}
KIMI_DELTA = "Kimi delta attention"
SHAPES = {"short convolutions": LFM2, "gated delta rule": QWEN3_NEXT, "Mamba 2": GRANITE4, KIMI_DELTA: KIMI_LINEAR}
EXACT = {"short convolutions": 1e-4, "gated delta rule": 0.02, "Mamba 2": 1e-4, KIMI_DELTA: 1e-3}
"""How far log-probabilities of what is computed in parts may be off: float32, and bfloat16."""
CUT_TOKENS = 64
"""A chunk that ends with a state is stored as a run by itself. What lies there of a text is not found if it is shorter;
where states end depends on the processor."""
MOVED = 0.15
"""Of what is approximate. The likelihoods of tokens lie close together here."""
GAIN = "20"
"""Of dummy weights with which rounding grows little from layer to layer, and states tell what stood before."""


def start(folder, shape, settings=MOVING, **options):
    arranged = ["harness.engines.dummy_weights:mend_for_cpus", GAIN]
    if shape["model_type"] == "kimi_linear":
        arranged = ["tests.vllm.kimi_stand_ins:put_in_place", GAIN]
    usual = OPTIONS | {"dtype": shape["torch_dtype"], "arrange": arranged}
    engine = Engine(drawn(folder, shape), settings, **usual | options)
    inside(engine, note_states)
    return engine


@pytest.mark.parametrize("kind", SHAPES)
def test_what_prompts_repeat_becomes_segments_that_move_into_another_engine(kind, texts, tmp_path):
    first, second, third = (texts.new(400) for _ in range(3))
    hub = HubProcess(tmp_path, arena_gib=0.25)
    settings = MOVING | {"endpoint": hub.endpoint, "hub": {}}
    try:
        with start(tmp_path, SHAPES[kind], settings) as engine, start(tmp_path, SHAPES[kind], settings) as another:
            engine.one([*texts.new(40), *first, *second, *texts.new(20)])
            # What stood elsewhere before is computed with its map. The whole prompt is computed, and so it is exact.
            for prompt in ([*texts.new(60), *third, *first, *texts.new(25)], [*second, *texts.new(9), *third]):
                made = engine.one(prompt, tokens=8)
                assert made.report["moved_tokens"] == 0 and made.report["hole_tokens"] > 700, made.report["reason"]
                error, rounding = inside(engine, error_of_states)
                assert error <= 3 * rounding + 1e-6
                own = engine.one(prompt, tokens=8, mode="off", store=False)
                assert disagreement([made], [own]) < EXACT[kind]
            prompt = [*texts.new(50), *second, *first, *texts.new(70), *third, *texts.new(28)]
            for each in (engine, another):
                each.forget()
                moved = each.one(prompt, tokens=8, store=False)
                # All but what begins each text, and what ends it.
                assert moved.report["moved_tokens"] > 1200 - 3 * (SEAM_TOKENS + 2 * TAIL_TOKENS + CUT_TOKENS)
                error, _ = inside(each, error_of_states)
                assert error < 0.5, "the state stands behind other tokens"
                own = each.one(prompt, tokens=8, mode="off", store=False)
                assert apart(moved, own) < MOVED
    finally:
        hub.kill()


def apart(answer, expected):
    """How far the log-probabilities of the first token are off, of those tokens that both answers name."""
    ours, theirs = answer.logprobs[0], expected.logprobs[0]
    assert len(ours.keys() & theirs) > len(ours) // 2
    return max(abs(ours[token] - theirs[token]) for token in ours.keys() & theirs)


def make_segments(engine, texts, *documents):
    """Have two prompts repeat documents, each behind other text."""
    for order in (documents, documents[::-1]):
        engine.one([*texts.new(40), *(token for document in order for token in (*document, *texts.new(20)))])
        engine.forget()


def test_a_state_goes_on_from_vllms_own_cache_and_from_one_that_is_loaded(texts, tmp_path):
    document, other, system = texts.new(300), texts.new(300), texts.new(330)
    with start(tmp_path, LFM2) as engine:
        make_segments(engine, texts, document, other)
        engine.one([*system, *texts.new(9)])
        prompt = [*system, *texts.new(30), *document, *texts.new(9)]
        for reused in ("engine", "exact"):  # what vLLM has, and what it had and the hub has still
            moved = engine.one(prompt, tokens=8, store=False)
            assert moved.report[f"{reused}_tokens"] == 320 and moved.report["moved_tokens"] > 200
            assert inside(engine, error_of_states)[0] < 0.5
            own = engine.one(prompt, tokens=8, mode="off", store=False)
            assert apart(moved, own) < MOVED
            engine.forget()
        # A load that fails takes nothing with it, and a prompt that moves nothing is computed as ever.
        inside(engine, fail_loads, True)
        failed = engine.one(prompt, tokens=8, store=False)
        assert disagreement([failed], [own]) < EXACT["short convolutions"] and failed.report["moved_tokens"] == 0


def test_each_rank_makes_the_maps_of_its_heads_and_goes_over_them(texts, tmp_path):
    documents = texts.new(300), texts.new(300)
    with Engine(
        drawn(tmp_path, QWEN3_NEXT),
        MOVING,
        **OPTIONS | RANKS | {"dtype": "bfloat16", "arrange": arrange(ranks, "", GAIN)},
    ) as engine:
        make_segments(engine, texts, *documents)
        prompt = [*texts.new(70), *documents[1], *documents[0], *texts.new(9)]
        moved = engine.one(prompt, tokens=8, store=False)
        assert moved.report["moved_tokens"] > 400
        own = engine.one(prompt, tokens=8, mode="off", store=False)
        assert apart(moved, own) < MOVED
        engine.forget()
        held = engine.one(prompt, tokens=8, store=False, doubt=1e6)
        assert held.report["doubt"]["token"] == 1 and "approximate_from" not in held.report
        assert apart(held, own) < MOVED


def test_a_model_whose_maps_are_wrong_reuses_exact_prefixes_and_a_line_says_why(texts, tmp_path):
    """vLLM's rotation of keys for CPUs is wrong for this model, and differs with the number of tokens."""
    with start(tmp_path, LFM2, arrange=arrange(draw_wide_weights, "", GAIN)) as engine:
        assert engine.log.count("exact prefixes are reused all the same") == 1
        document = texts.new(200)
        make_segments(engine, texts, document)
        engine.one(document)
        engine.forget()
        again = engine.one([*document, *texts.new(9)], store=False)
        assert again.report["exact_tokens"] == 192 and again.report["moved_tokens"] == 0
