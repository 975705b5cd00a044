"""Which LoRA adapter has computed a request's KV: what workers notice, and what the scheduler side makes of it."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights, PackedLoRALayerWeights
from vllm.lora.request import LoRARequest

from blendhub.core.errors import AdapterReplaced
from blendhub.core.layout import Variant
from blendhub.vllm.messages import Adapter, LoadedAdapter, WorkerReport
from blendhub.vllm.model.fingerprint import adapter_fingerprint
from blendhub.vllm.scheduler.admission import Adapters
from blendhub.vllm.worker.loaded_adapters import LoadedAdapters
from tests.vllm.played_engine import text

LORA = LoRARequest("one", 1, "org/a")


def adapter_of(value=1.0, *, at=(7, 3), scaling=1.0):
    """An adapter of vLLM's with a packed layer, one of whose parts it leaves as it is."""
    down, up = torch.ones(8, 16, dtype=torch.bfloat16), torch.ones(32, 8, dtype=torch.bfloat16)
    up[at[0] :, at[1] :] = value
    packed = PackedLoRALayerWeights("m.qkv", 8, [8, None], [down, None], [up.clone(), None], [1.0, None])
    return LoRAModel(1, 8, {"m.qkv": packed, "m.o": LoRALayerWeights("m.o", 8, 8, down, up, scaling)})


def test_every_tensor_of_an_adapter_counts():
    same = adapter_fingerprint(adapter_of())
    assert same == adapter_fingerprint(adapter_of())
    others = [adapter_of(2.0), adapter_of(2.0, at=(20, 3)), adapter_of(scaling=2.0)]
    assert len({same, *map(adapter_fingerprint, others)}) == 4


@pytest.fixture
def memory():
    """What vLLM has loaded, and what a worker notices of it."""
    loaded = {}
    return loaded, LoadedAdapters(SimpleNamespace(list_adapters=lambda: dict(loaded)))


def test_a_worker_notices_other_weights_and_not_that_vllm_reads_the_same_again(memory):
    loaded, seen = memory
    seen.look(1)
    assert seen.take_changes() is None
    loaded[1] = adapter_of()
    seen.look(2)
    ((number, first),) = seen.take_changes().items()
    asked = Adapter(number, first.weights, first.since)
    assert (number, first.since) == (1, 2)
    seen.check(asked, is_loaded=True)
    loaded.clear()
    seen.look(3)
    assert seen.take_changes() == {}
    seen.check(asked, is_loaded=False)
    with pytest.raises(AdapterReplaced, match="dropped"):
        seen.check(asked, is_loaded=True)
    loaded[1] = adapter_of()
    seen.look(4)
    assert seen.take_changes() == {1: first}
    # Other weights, and the first ones again: a request may have computed with both.
    for step, value in ((5, 2.0), (6, 1.0)):
        loaded[1] = adapter_of(value)
        seen.look(step)
        with pytest.raises(AdapterReplaced, match="other weights"):
            seen.check(asked, is_loaded=False)
    assert seen.take_changes() == {1: LoadedAdapter(first.weights, 6)}


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


def test_ranks_that_have_loaded_different_weights_are_told_apart_together():
    """Expert parallelism gives each rank the experts that it computes."""
    adapters, lora = Adapters(ranks=2), LoRARequest("one", 1, "org/a")
    first, second, third = (LoadedAdapter(*of) for of in (("x", 4), ("y", 5), ("z", 9)))
    adapters.report({0: {1: first}})
    assert adapters.find(lora) is None, "one rank has not reported"
    adapters.report({1: {1: second}})
    found = adapters.find(lora)
    assert (found.id, found.since) == (1, 5)
    adapters.report({1: {1: third}})
    assert adapters.find(lora).weights != found.weights and adapters.find(lora).since == 9
    assert adapters.was_replaced(lora) and not adapters.was_replaced(LoRARequest("two", 1, "org/a"))
    adapters.report({0: {}})
    assert adapters.find(lora) is None


def report(engine, weights, since, number=1):
    engine.side.process_report(WorkerReport(adapters={0: {number: LoadedAdapter(weights, since)}}))


def stored(engine, tokens, weights):
    """How many tokens are found of the adapter with these weights."""
    adapters = Adapters(1)
    adapters.report({0: {1: LoadedAdapter(weights, 1)}})
    found = engine.client.lookup(
        np.asarray(tokens, np.uint32), Variant(adapters.find(LORA).weights), acquire=False
    ).result()
    return sum(len(match.span) for match in found.matches)


def computed(engine, name, prompt, *, lora=LORA, local=0, cut=None, weights="x", since=0, then=()):
    """A request that two steps compute, after which the worker reports its adapter, and what ``then`` says."""
    request, cut = engine.request(name, prompt, lora=lora), cut or len(prompt) // 2
    engine.side.arrived(request)
    assert engine.load(request, local) == local
    engine.step(**{name: (local, cut - local)})
    first = engine.side._n_steps
    report(engine, weights, since or first, lora.lora_int_id)
    for other in then:
        report(engine, other, first + 1, lora.lora_int_id)
    engine.step(**{name: (cut, len(prompt) - cut)})
    engine.end(request, len(prompt))
    return engine.side


@pytest.mark.parametrize("then", [["y"], ["y", "x"]], ids=["once", "and back"])
def test_what_two_adapters_have_computed_is_not_stored(engine, then):
    prompt = text(0, 96)
    side = computed(engine, "a", prompt, then=then)
    assert stored(engine, prompt, "x") == stored(engine, prompt, "y") == 0
    assert side.reports.counters["reservations_failed_AdapterReplaced"] == 1


def test_what_stands_behind_vllm_s_cached_kv_of_an_earlier_adapter_is_not_stored(engine):
    """The prefix cache of some versions of vLLM tells adapters apart by their names alone."""
    other = LoRARequest("one", 2, "org/b")
    computed(engine, "a", text(0, 96))
    now, number = engine.side._n_steps + 1, other.lora_int_id
    report(engine, "y", now, number)
    longer = text(0, 96) + text(1, 96)
    computed(engine, "b", longer, lora=other, local=96, cut=128, weights="y", since=now)
    assert stored(engine, longer, "y") == 0
    computed(engine, "c", text(2, 96), lora=other, weights="y", since=1)
    assert stored(engine, text(2, 96), "y") == 96, "this begins anew"


def test_a_report_from_before_is_not_taken_for_what_vllm_reads_in_place():
    adapters = Adapters(ranks=1)
    adapters.report({0: {1: LoadedAdapter("x", 1)}})
    anew = LoRARequest("one", 1, "org/a", load_inplace=True)
    adapters.find(anew)
    adapters.report({0: {1: LoadedAdapter("y", 2)}})
    adapters.find(anew)
    assert not adapters.was_replaced(anew), "no request has computed with the first weights under this name"
    adapters.report({0: {1: LoadedAdapter("z", 3)}})
    assert adapters.was_replaced(anew)


def test_the_names_that_are_remembered_are_bounded(monkeypatch):
    monkeypatch.setattr("blendhub.vllm.scheduler.admission.MOST_NAMED", 8)
    adapters = Adapters(1)
    for number in range(30):
        lora = LoRARequest(f"name {number}", number + 1, "org/a")
        for weights in ("old", "new"):
            adapters.report({0: {number + 1: LoadedAdapter(weights, 0)}})
            adapters.find(lora)
    assert adapters.was_replaced(lora)
    assert len(adapters._weights) == len(adapters._replaced) == len(adapters._names) == 8
