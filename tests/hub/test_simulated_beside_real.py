"""The analysis plays prompts as a real hub answers engines: with an arena, leases and evictions."""

from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from blendhub_tools.analysis.lines import Place
from blendhub_tools.analysis.simulated_hub import MIN_SAVED_TOKENS, SimulatedHub

from blendhub.client import wire
from blendhub.core.spans import MAX_GENERATION, Span, generation_of
from blendhub.vllm.scheduler.save_plan import SavePlan
from blendhub.vllm.settings import ReusePolicy
from tests.hub.hub_direct import CHUNK, HOST, MATCHERS


def prompts(seed, n):
    random = np.random.default_rng(seed)
    documents = [random.integers(0, 2**32, int(random.integers(70, 200)), dtype=np.uint32) for _ in range(14)]
    for _ in range(n):
        parts = [documents[0]]
        for number in random.choice(np.arange(1, 14), 3, replace=False):
            parts += [documents[number], random.integers(0, 2**32, int(random.integers(1, 90)), dtype=np.uint32)]
        yield np.concatenate(parts)


@pytest.mark.parametrize("n_slots", [20, 40, 1000])
def test_a_real_hub_finds_and_evicts_the_same(make_hub, n_slots):
    real = make_hub(n_slots=n_slots)
    engine = real.join()
    played = SimulatedHub(HOST, MATCHERS, [n_slots], chunk_tokens=CHUNK)
    for number, prompt in enumerate(prompts(1, 60), 1):
        found = engine.lookup(prompt, settled=0.0, max_generation=MAX_GENERATION)
        _store(engine, prompt, found.matches)
        if found.lease is not None:
            engine.ask(wire.Release, lease=found.lease)
        (reused,) = played.play(prompt, Place("log", number)).reused
        exact = sum(len(match.span) for match in found.matches if match.exact)
        moved = sum(len(match.span) for match in found.matches if not match.exact)
        assert (reused.exact, reused.moved) == (exact, moved), f"prompt {number}"
    assert played.arenas[0].evictions == real.state.cache.evictions
    assert bool(real.state.cache.evictions) == (n_slots < 1000)


def _store(engine, prompt, matches):
    def reserve(span: Span, kind: str, run: int | None) -> Future[Any]:
        generation = 0 if kind == "exact" else generation_of(matches)
        engine.store(prompt, span, generation=generation, run=run)
        return Future()

    first = next((match.span.start for match in matches if not match.exact), None)
    SavePlan(reserve, ReusePolicy().min_saved_tokens).begin(len(prompt), [match.span for match in matches], first)


def test_stretches_are_as_short_as_engines_store_them():
    assert ReusePolicy().min_saved_tokens == MIN_SAVED_TOKENS
