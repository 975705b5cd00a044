"""Models with recurrent layers: exact prefixes come back up to a state, and are then what vLLM's own cache has.

These layers answer differently when a prompt is computed in other pieces. Behind what was loaded and behind what vLLM's
own prefix cache has, the same tokens are computed, so that answers are equal to the bit.
"""

import re
from pathlib import Path

import pytest

from blendhub.hub.config import StoreChoice
from harness.engines import Engine, disagreement
from harness.engines.shapes import GRANITE4, LFM2, QWEN3_NEXT
from harness.waiting import wait_until
from tests.hub.processes import HubProcess
from tests.vllm.arrangements import fail_loads, inside, stored_states
from tests.vllm.conftest import SETTINGS, TOLERANCE, drawn
from tests.vllm.shapes import KIMI_LINEAR

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SHAPES = [
    pytest.param(LFM2, id="short convolutions"),
    pytest.param(QWEN3_NEXT, id="gated delta rule"),
    pytest.param(GRANITE4, id="Mamba 2", marks=pytest.mark.long),
    pytest.param(KIMI_LINEAR, id="Kimi delta attention", marks=pytest.mark.long),
]
"""``test_engine_segments`` loads states of all of them."""


def start(folder, shape, settings=SETTINGS, **options):
    usual = {"load_format": "dummy", "seed": 7, "enable_prefix_caching": True, "dtype": shape["torch_dtype"]}
    arranged = ["harness.engines.dummy_weights:mend_for_cpus"]
    if shape is KIMI_LINEAR:
        arranged = ["tests.vllm.kimi_stand_ins:put_in_place", "20"]
    return Engine(drawn(folder, shape), settings, **{**usual, "arrange": arranged, **options})


def state_tokens(engine):
    """How many tokens lie between two states that vLLM may keep."""
    (tokens,) = re.findall(r"reused where one is stored behind a multiple of (\d+) tokens", engine.log)
    return int(tokens)


def check_as_in_vllms_own_cache(answer, own):
    assert answer.report.get("engine_tokens", 0) == 0, "vLLM's own cache has it"
    assert answer.report["exact_tokens"] == answer.cached == own.cached, answer.report["reason"]
    assert disagreement([answer], [own]) == 0


def failures(engine):
    return [name for name in engine.call("counts") if re.match("(saves|loads|reservations)_failed", name)]


@pytest.mark.parametrize("shape", SHAPES)
def test_prefixes_come_back_into_another_engine_after_eviction_and_from_disk(shape, texts, tmp_path):
    store = StoreChoice(options={"path": str(tmp_path / "store"), "capacity_gib": 1.0})
    hub = HubProcess(tmp_path, arena_gib=0.25, store=store)
    settings = SETTINGS | {"endpoint": hub.endpoint, "hub": {}}
    document = texts.new(1300)
    prompts = [[*document, *texts.new(n)] for n in (9, 150, 33)]

    def again():
        first.forget()
        return first.one(prompts[0], tokens=40, store=False)

    try:
        with start(tmp_path, shape, settings) as first, start(tmp_path, shape, settings) as second:
            assert first.log.count("exact prefixes only") == 1
            size = state_tokens(first)
            first.one(document)
            own = [first.one(prompt, tokens=40, mode="off", store=False) for prompt in prompts]
            assert [answer.cached for answer in own] == [len(document) // size * size] * 3
            first.forget()
            for engine in (second, first):
                for prompt, expected in zip(prompts, own, strict=True):
                    check_as_in_vllms_own_cache(engine.one(prompt, tokens=40, store=False), expected)
                    engine.forget()
            # vLLM has to compute a token behind the state, and no text is found elsewhere.
            for prompt in (document[: len(document) // size * size], [*texts.new(40), *document]):
                assert first.one(prompt, store=False).report.get("exact_tokens", 0) == 0
            hub.stop()
            hub.start()
            # What is asked before the engine's processes have sessions again is computed.
            wait_until(lambda: again().report["exact_tokens"] > 0, 60)
            check_as_in_vllms_own_cache(again(), own[0])
            assert not failures(second)
    finally:
        hub.kill()


def test_states_are_stored_where_prompts_end_where_they_part_and_behind_answers(texts, tmp_path):
    """In steps of 160 tokens, of which each leaves a state in vLLM's cache, as told, and so does an answer."""
    document, written = texts.new(700), {"sampling": {"ignore_eos": True}}
    with start(tmp_path, LFM2, max_num_batched_tokens=160, prefix_cache_retention_interval=32) as engine:
        size = state_tokens(engine)
        answered = engine.one(document, tokens=100, **written)
        engine.one([*document[:400], *texts.new(100)])
        assert inside(engine, stored_states) == [384, 480, 672, 768]
        # Two requests have computed what stands before their states, in other pieces: vLLM goes on behind the first.
        prompts = [[*document, *answered.tokens, *texts.new(9)], [*document[:400], *texts.new(50)]]
        own = [engine.one(prompt, tokens=20, mode="off", store=False) for prompt in prompts]
        for prompt, expected, end in zip(prompts, own, (768, 384), strict=True):
            engine.forget()
            check_as_in_vllms_own_cache(engine.one(prompt, tokens=20, store=False), expected)
            assert expected.cached == end
        # What vLLM's own cache does not know of, the hub does.
        for found, states in ((384, [576, 672]), (576, [])):
            engine.forget()
            before = inside(engine, stored_states)
            parted = engine.one([*document[:600], *texts.new(100)], store=bool(states))
            assert parted.report["exact_tokens"] == found
            engine.forget()
            assert inside(engine, stored_states) == sorted([*before, *states])
        assert not failures(engine) and size == 32
        inside(engine, fail_loads, True)
        assert len(engine.one(prompts[0], tokens=20, store=False).tokens) == 20
        assert failures(engine) == ["loads_failed"]


def test_without_vllms_prefix_cache_there_are_no_states_and_one_line_says_why_nothing_is_reused(texts, tmp_path):
    prompts = [texts.new(n) for n in (200, 333)]
    with start(tmp_path, LFM2, enable_prefix_caching=False) as engine:
        assert engine.log.count("keeps a recurrent state, and none of blocks that are full") == 1
        assert "/dev/shm/blendhub-" not in Path(f"/proc/{engine.pid}/maps").read_text(), "a hub was started for it"
        first = engine.ask(*prompts, tokens=9)
        again = engine.ask(*prompts, tokens=9)
        assert disagreement(again, first) < TOLERANCE
        assert all("with --enable-prefix-caching" in answer.report["reason"] for answer in again)
        assert engine.call("counts") == {"refused_model": 4}
