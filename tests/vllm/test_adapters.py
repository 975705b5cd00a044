"""Which LoRA adapter has computed a request's KV: what workers notice, and what the scheduler side makes of it."""

from types import SimpleNamespace

import numpy as np
import pytest
from vllm.lora.request import LoRARequest

from blendhub.core.layout import Variant
from blendhub.vllm.messages import LoadedAdapter, WorkerReport
from blendhub.vllm.scheduler.admission import Adapters
from blendhub.vllm.worker.loaded_adapters import LoadedAdapters
from tests.vllm.played_engine import text
from tests.vllm.test_fingerprint import adapter_of

LORA = LoRARequest("one", 1, "org/a")


@pytest.fixture
def memory():
    """What vLLM has loaded, and what a worker notices of it."""
    loaded = {}
    return loaded, LoadedAdapters(SimpleNamespace(list_adapters=lambda: dict(loaded)))


def test_an_adapter_whose_weights_cannot_be_read_is_not_known_and_ends_no_step(memory, caplog):
    loaded, seen = memory
    for step, model in enumerate([adapter_of(), *[SimpleNamespace(loras=None) for _ in range(3)]], 1):
        loaded[1] = model
        seen.look(step)
    assert seen.take_changes() == {}
    assert caplog.text.count("the weights of LoRA adapter 1 cannot be read") == 1
    loaded[1] = adapter_of()
    seen.look(5)
    assert seen.take_changes()[1].since == 5


def test_weights_are_those_of_all_ranks_and_a_name_that_gets_others_is_known():
    """Expert parallelism gives each rank the experts that it computes."""
    adapters = Adapters(ranks=2)

    def report(rank, weights, since):
        adapters.report({rank: {1: LoadedAdapter(weights, since)}})
        return adapters.find(LORA)

    assert report(0, "x", 4) is None, "one rank has not reported"
    first = report(1, "y", 5)
    assert (first.id, first.since) == (1, 5) and not adapters.was_replaced(LORA)
    later = report(1, "z", 9)
    assert later.weights != first.weights and later.since == 9
    assert adapters.was_replaced(LORA) and not adapters.was_replaced(LoRARequest("two", 1, "org/a"))
    adapters.report({0: {}})
    assert adapters.find(LORA) is None


@pytest.mark.parametrize("later", [[], ["y"], ["y", "x"]], ids=["one", "two", "two, and the first again"])
def test_what_two_adapters_have_computed_is_not_stored(engine, later):
    """Two steps compute the request; after the first, the worker reports its adapter, and perhaps others."""
    prompt = text(0, 96)
    request = engine.arrived("a", prompt, lora=LORA)
    engine.load(request)
    engine.step(a=(0, 48))
    for after, weights in enumerate(["x", *later]):
        adapter = LoadedAdapter(weights, engine.side._n_steps + (after > 0))
        engine.side.process_report(WorkerReport(adapters={0: {1: adapter}}))
    engine.step(a=(48, 48))
    engine.end(request, 96)
    for weights in "xy":
        adapters = Adapters(1)
        adapters.report({0: {1: LoadedAdapter(weights, 1)}})
        variant = Variant(adapters.find(LORA).weights)
        matches = engine.client.lookup(np.asarray(prompt, np.uint32), variant, acquire=False).result().matches
        assert bool(matches) == (weights == "x" and not later)
    assert engine.counters["reservations_failed_AdapterReplaced"] == bool(later)
