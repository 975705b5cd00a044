"""Engines learn how much recomputed tokens' KV depends on context, and the hub keeps it."""

import time

import numpy as np
import pytest

from harness.engines import Engine
from tests.hub.processes import HubProcess
from tests.vllm.conftest import SETTINGS
from tests.vllm.test_engine_ranks import FORKED, environment  # noqa: F401  (a fixture)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROLLING = SETTINGS | {"matchers": [{"name": "rolling_hash"}]}
"""Without the prefix matcher, whose answers come first, text is moved wherever its run is not exact."""


def known(engine: Engine, prompt: list[int], n: int, salt: str = "") -> np.ndarray:
    """What the hub knows of a prompt's tokens, of which it has learned so many: engines do not wait for it."""
    until = time.monotonic() + 20
    while time.monotonic() < until:
        found = np.frombuffer(engine.call("sensitivity", prompt, salt), np.uint8)
        if np.count_nonzero(found) >= n:
            break
        time.sleep(0.05)
    assert np.count_nonzero(found) == n
    return np.pad(found, (0, len(prompt) - len(found)))


def test_context_that_matters_gives_high_bytes_and_the_same_context_the_lowest(model, texts):
    document, before, question = texts.new(300), texts.new(100), texts.new(120)
    prompt = [*before, *document, *question]
    with Engine(model, ROLLING) as engine:
        assert engine.call("batches_in_flight") == 2
        engine.one(document)
        engine.forget()
        # The question's KV is stored as computed behind the document's, all of which is computed anew: it is right.
        assert engine.one(prompt, recompute_ratio=1.0).report["moved_tokens"] == 300
        learned = known(engine, prompt, 300)
        assert (learned[100:400] > 0).all() and not learned[:100].any() and not learned[400:].any()
        assert np.median(learned[100:400]) > 60, "a change of a twentieth and more"
        engine.forget()
        again = [*prompt, *texts.new(5)]
        assert engine.one(again, recompute_ratio=1.0, store=False, settled=False).report["moved_tokens"] == 420
        learned = known(engine, prompt, 420)
        assert set(learned[400:].tolist()) == {1}
        assert np.median(learned[100:400]) > 60


def test_what_was_not_recomputed_has_no_byte(model, texts):
    document = texts.new(300)
    prompt = [*texts.new(40), *document, *texts.new(9)]
    with Engine(model, SETTINGS | {"selector": {"name": "first_k", "options": {"k": 30}}}) as engine:
        engine.one(document)
        engine.forget()
        assert engine.one(prompt, recompute_ratio=0.5, store=False).report["recomputed_tokens"] == 30
        assert known(engine, prompt, 30)[40:70].all()


def test_nothing_is_learned_where_that_is_switched_off(model, texts):
    document = texts.new(300)
    prompt = [*texts.new(40), *document, *texts.new(9)]
    with Engine(model, SETTINGS | {"learn_sensitivity": False}) as engine:
        engine.one(document)
        engine.forget()
        assert engine.one(prompt, recompute_ratio=1.0, store=False).report["recomputed_tokens"] == 300
        time.sleep(1.0)
        assert engine.call("sensitivity", prompt) == b""


def learned_by(engine: Engine, document: list[int], before: list[int], prompt: list[int]) -> list[np.ndarray]:
    """The bytes of a document, computed alone and then in a prompt: by recomputing what was stored, and, under another
    salt, by storing it twice. The last ones are those of the second copy.
    """
    recomputed = {"recompute_ratio": 1.0, "store": False}
    engine.one(document)
    engine.forget()
    assert engine.one(prompt, **recomputed).report["recomputed_tokens"] == 300
    found = [known(engine, prompt, 300)]
    engine.one(document, cache_salt="twice")
    engine.one(prompt, mode="off", cache_salt="twice")
    found.append(known(engine, prompt, 300, "twice"))
    start = len(before)
    return [one[start : start + 300].astype(int) for one in found]


def test_all_ways_and_two_ranks_learn_the_same(model, environment, texts):  # noqa: F811
    """Each rank has half of the heads. A request that reuses nothing stores its text again, in another context."""
    document, before = texts.new(300), texts.new(40)
    prompt = [*before, *document, *texts.new(9)]
    learned = []
    for options in ({}, {"variables": environment, **FORKED}):
        with Engine(model, SETTINGS, **options) as engine:
            learned += learned_by(engine, document, before, prompt)
    assert all(np.abs(learned[0] - one).max() <= 1 for one in learned[1:])
    assert np.median(learned[0]) > 60


def test_both_copies_of_a_text_that_is_stored_twice_have_bytes(model, texts):
    document, before = texts.new(300), texts.new(40)
    with Engine(model, SETTINGS) as engine:
        engine.one(document)
        engine.forget()
        engine.one([*before, *document, *texts.new(9)], mode="off")
        for prompt in ([*document, *texts.new(70)], [*before, *document, *texts.new(70)]):
            assert known(engine, prompt, 300).any(), "both are found exactly"


def test_what_one_engine_learned_outlives_its_hub_and_serves_another(model, texts, tmp_path):
    document = texts.new(300)
    prompt = [*texts.new(40), *document, *texts.new(9)]
    hub = HubProcess(tmp_path, arena_gib=0.25, store=tmp_path / "store")
    settings = SETTINGS | {"endpoint": hub.endpoint, "hub": {}}
    with Engine(model, settings) as engine:
        engine.one(document)
        engine.forget()
        assert engine.one(prompt, recompute_ratio=1.0, store=False).report["recomputed_tokens"] == 300
        learned = known(engine, prompt, 300)
    time.sleep(1.0)  # it is written behind the answer
    hub.kill()
    hub.start()
    with Engine(model, settings) as engine:
        assert (known(engine, prompt, 300) == learned).all()
    hub.kill()
