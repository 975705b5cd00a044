"""A worker's steps with a real hub and scheduler side: when copies begin, when they are noticed, and what waits."""

import time
from types import SimpleNamespace

import numpy as np
import pytest
from msgspec.structs import replace
from vllm.v1.core.sched.output import SchedulerOutput

from blendhub import Span
from blendhub.client.hub_client import HubClient
from blendhub.core.plugin_choice import PluginChoice
from blendhub.vllm.messages import Adapter, HubAddress, StepPlan
from blendhub.vllm.worker.loaded_adapters import LoadedAdapters
from tests.hub.processes import HubProcess
from tests.slow_registration import SlowRegistration
from tests.vllm.played_engine import HOST, NAMESPACE, PlayedEngine, text
from tests.vllm.played_worker import NotingDevice, SideDevice, played_worker, worker_of


def failed(worker):
    return [job.request for job in worker.worker.take_failed()]


@pytest.fixture
def device():
    return SideDevice()


@pytest.fixture
def worker(device):
    with played_worker(device, text(0, 96)) as worker:
        worker.start()
        yield worker


def test_a_copy_runs_beside_the_forward_of_the_step_that_plans_it(worker):
    worker.arrive("r", text(0, 96) + text(1, 32))
    worker.step()
    assert worker.model.kv[1:7].all(), "the copy has not run in its step"
    assert worker.steps not in worker.forwards, "the copy waited for a forward that came after it"


def test_a_copy_that_ends_while_a_forward_is_launched_is_reported_in_that_step(worker, device):
    worker.arrive("r", text(0, 96) + text(1, 32))
    device.is_held = True
    assert worker.step() == set()

    def release() -> None:
        device.is_held = False

    assert worker.step(after_forward=release) == set(), "the lease is not proven yet"
    assert worker.step() == {"r"}


def test_what_vllm_has_cached_is_neither_asked_of_the_hub_nor_overwritten():
    """Other requests read those blocks. The hub's pieces and the device's copy begin behind them, each by itself."""
    device = NotingDevice()
    with played_worker(device, text(0, 96)) as worker:
        worker.start()
        worker.arrive("r", text(0, 96) + text(1, 32), local=48)
        assert worker.step() == {"r"}
        assert device.noted == [(48, 48)]
        assert not worker.model.kv[1:4].any() and worker.model.kv[4:7].all()


def test_a_load_whose_adapter_is_replaced_while_it_is_copied_fails(worker, device, monkeypatch):
    loaded = {1: SimpleNamespace(loras={})}
    seen = worker.worker._adapters = LoadedAdapters(SimpleNamespace(list_adapters=loaded.copy))
    worker.step()
    side_plan = worker.engine.side.plan

    def plan(step):
        made = side_plan(step)
        made.loads = [replace(job, adapter=Adapter(1, "weights", seen._known[1].since)) for job in made.loads]
        return made

    monkeypatch.setattr(worker.engine.side, "plan", plan)
    request = worker.arrive("r", text(0, 96) + text(1, 32))
    device.is_held = True
    assert worker.step() == set()
    part = SimpleNamespace(scaling=1.0, lora_a=None, lora_b=None)
    loaded[1], device.is_held = SimpleNamespace(loras={"layer": part}), False
    assert worker.step() == {"r"}
    report = worker.engine.report(request.request_id)
    assert "AdapterReplaced" in report["reason"] and failed(worker) == ["r"]


def test_an_aborted_load_holds_up_no_step_and_keeps_its_blocks_and_lease_until_its_copy_has_ended(worker, device):
    request = worker.arrive("aborted", text(0, 96) + text(1, 32))
    device.is_held = True
    worker.step()
    assert worker.engine.side.ended(request, ([1, 2, 3, 4, 5, 6],))[0] is False
    for _ in range(3):  # a step that waited for the copy would fail in its ``wait``
        assert worker.step() == set(), "vLLM would give the blocks to others while the copy writes them"
    assert worker.engine.gauge("read_leases") == 1
    other = worker.arrive("other", text(0, 96) + text(2, 32), first_block=20)
    worker.step()
    device.is_held = False
    assert worker.step() == {"aborted", "other"}
    worker.engine.settle()
    assert worker.engine.gauge("read_leases") == 0
    assert worker.engine.report(other.request_id)["exact_tokens"] == 96
    assert failed(worker) == []


@pytest.mark.parametrize("ends", [False, True], ids=["the session lives", "the session ends"])
def test_a_load_that_takes_long_while_others_fill_the_arena(device, ends):
    """While the scheduler's session lives, nothing that the lease covers is evicted. Where it ends, what was copied
    proves nothing, and vLLM computes the tokens."""
    with played_worker(device, text(0, 96), arena_gib=0.0005) as worker:
        worker.start()
        device.is_held = True
        request = worker.arrive("r", text(0, 96) + text(1, 32))
        engine, until = worker.engine, time.monotonic() + 1.5
        if ends:  # as if the scheduler's process had stood still
            engine.side.executor.client._join()
        with engine.hub.connect() as writer:
            writer.register("other", NAMESPACE, 0)
            numbers = iter(range(10**9, 2 * 10**9, 96))
            while time.monotonic() < until:
                assert not worker.step()
                for _ in range(20):
                    tokens = np.arange(96, dtype=np.uint32) + next(numbers)
                    reserved = writer.reserve(tokens, Span(0, 96))
                    for slot in reserved.slots:
                        writer.shard(slot.slot)[:] = 2
                    writer.commit(reserved.right, reserved.span.end)
            assert writer.stats().counters["evictions"] > 0
        found = engine.client.lookup(np.asarray(text(0, 96), np.uint32), acquire=False).result().matches
        assert (found or ends) and engine.gauge("read_leases") == (not ends)
        device.is_held = False
        while not worker.step():
            assert time.monotonic() < until + 20
        report = engine.report(request.request_id)
        assert engine.gauge("read_leases") == 0
        assert report["exact_tokens"] == (0 if ends else 96)
        assert failed(worker) == (["r"] if ends else [])
        if ends:
            assert "LeaseError" in report["reason"]


@pytest.mark.slow
def test_a_hub_that_is_restarted_between_lookup_and_load_costs_the_load_alone(device, tmp_path):
    hub = HubProcess(tmp_path)
    engine = PlayedEngine(None, HubAddress(hub.endpoint, PluginChoice("zmq")), rank=-1)
    with HubClient(hub.endpoint, host=HOST) as writer:
        writer.register("engine", NAMESPACE, 0)
        writer.commit(writer.reserve(np.asarray(text(0, 96), np.uint32), Span(0, 96)).right, 96)
    with worker_of(engine, device) as worker:
        worker.start()
        request = worker.arrive("r", text(0, 96) + text(1, 32))
        clients = [engine.side.executor.client, worker.worker._executor.client]
        before = engine.client.epoch
        hub.kill()
        hub.start()
        until = time.monotonic() + 30
        while any(client.epoch == before or not client.is_up for client in clients):
            assert time.monotonic() < until
            time.sleep(0.01)
        plan = engine.side.plan(SchedulerOutput.make_empty())
        loaded: set[str] = set()
        while "r" not in loaded:
            assert time.monotonic() < until
            worker.worker.begin_step(plan)
            worker.worker.load(plan)
            loaded = worker.worker.finished()[1]
            plan = StepPlan()
            time.sleep(0.01)
        engine.side.process_report(worker.worker.take_report())
        assert failed(worker) == ["r"] and not worker.model.kv.any()
        assert "StaleEpoch" in engine.report(request.request_id)["reason"]
    engine.close()
    hub.kill()


def test_no_step_waits_for_the_registration_of_the_arena_and_requests_are_served_meanwhile():
    """The machine may take minutes; here it takes until the request is served, so a step that waited would hang."""
    runtime = SlowRegistration()
    with played_worker(SideDevice(runtime), text(0, 96)) as worker:
        worker.start()
        runtime.wait_for_call()
        worker.arrive("r", text(0, 96) + text(1, 32))
        assert worker.step() == {"r"} and not runtime.registered
        runtime.allow_soon(10_000)


@pytest.mark.slow
def test_a_restarted_hub_s_arena_is_pinned_in_the_next_step_and_not_only_for_a_request(device, tmp_path):
    hub = HubProcess(tmp_path)
    engine = PlayedEngine(None, HubAddress(hub.endpoint, PluginChoice("zmq")), rank=-1)
    with worker_of(engine, device) as worker:
        worker.start()
        assert device.pins == 1
        clients = [engine.client, engine.side.executor.client, worker.worker._executor.client]
        before = engine.client.arena.name
        hub.kill()
        hub.start()
        until = time.monotonic() + 30
        while any(client.arena.name == before or not client.is_up for client in clients):
            assert time.monotonic() < until
            time.sleep(0.01)
        worker.step()
        assert device.pins == 2
    engine.close()
    hub.kill()


@pytest.mark.parametrize("samples_last", [False, True], ids=["V2", "V1 on a GPU"])
def test_a_step_s_tokens_do_not_wait_for_what_is_recomputed_beside_it(worker, monkeypatch, samples_last):
    """vLLM's V1 runner samples after the connector's load; so in its steps recomputation comes after the tokens."""
    order = []
    monkeypatch.setattr(worker.model, "samples_last", samples_last)
    monkeypatch.setattr(worker.worker._forwards, "step", lambda blends, budget: order.append(f"recompute {budget}"))

    def step(budget, *, computes):
        plan = StepPlan(budget=budget, computes=computes)
        worker.worker.begin_step(plan)
        order.append("forward")
        worker.worker.load(plan)
        order.append("tokens")

    step(7, computes=True)
    step(8, computes=True)
    step(9, computes=False)
    if samples_last:
        first = ["forward", "tokens", "recompute 7", "forward", "tokens"]
        assert order == [*first, "recompute 8", "forward", "recompute 9", "tokens"]
    else:
        assert order == [part for n in (7, 8, 9) for part in ("forward", f"recompute {n}", "tokens")]
