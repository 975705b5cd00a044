"""A worker's steps with a real hub and scheduler side: when copies begin, when they are noticed, and what waits."""

import time

import msgspec
import numpy as np
import pytest
import torch
from msgspec.structs import replace

from blendhub import Span
from blendhub.client.hub_client import HubClient
from blendhub.client.wire import Slot
from blendhub.client.write_rights import WriteRight
from blendhub.core.plugin_choice import PluginChoice
from blendhub.vllm.messages import Adapter, HubAddress, SaveJob, StepPlan
from blendhub.vllm.worker import connector_worker, forwards
from blendhub.vllm.worker.load_task import LoadProgress
from blendhub.vllm.worker.recompute import HostCopy
from harness.waiting import wait_until
from tests.hub.processes import HubProcess
from tests.vllm.played_engine import HOST, NAMESPACE, SETTINGS, PlayedEngine, text
from tests.vllm.played_worker import SideDevice, played_worker, worker_of

STORED = text(0, 96)
PROMPT = STORED + text(1, 32)


@pytest.fixture
def device():
    return SideDevice()


@pytest.fixture
def worker(device):
    with played_worker(device, STORED) as worker:
        yield worker


def reason(worker):
    """Why the request whose load has failed is computed; its lease ends."""
    assert worker.failed() == ["r"]
    worker.engine.eventually(lambda: not worker.engine.gauge("read_leases"))
    return worker.engine.report("r")["reason"]


def test_a_copy_runs_beside_the_forward_of_the_step_that_plans_it(worker):
    worker.arrive("r", PROMPT)
    worker.step()
    assert worker.kv[:6].all(), "the copy has not run in its step"
    assert worker.steps not in worker.forwards, "the copy waited for a forward that came after it"


class Busy:
    """What a transfer's polls are held by: the copy takes so many of them."""

    def __init__(self, polls: int) -> None:
        self.polls = polls

    def __bool__(self) -> bool:
        self.polls -= 1
        return self.polls >= 0


def test_a_step_that_computes_nothing_waits_for_a_copy_and_reports_it(worker, device, monkeypatch):
    """vLLM sleeps for a millisecond behind each such step, and a load takes several turns."""
    monkeypatch.setattr(connector_worker, "WAIT_S", 30)  # the hub proves the lease, and a busy one takes its time
    worker.arrive("r", PROMPT)
    device.is_held = Busy(9)
    assert worker.step(computes=False) == {"r"}
    assert not worker.failed()


def test_no_step_waits_long_for_a_copy_and_none_that_computes(worker, device, monkeypatch):
    monkeypatch.setattr(connector_worker, "WAIT_S", 0.05)
    worker.arrive("r", PROMPT)
    device.is_held = True
    for computes, waited in ((True, False), (False, True)):
        started = time.perf_counter()
        assert worker.step(computes=computes) == set()
        assert (time.perf_counter() - started > 0.05) is waited


def test_what_vllm_has_cached_is_neither_asked_of_the_hub_nor_overwritten(worker, device):
    """Other requests read those blocks. The hub's pieces and the device's copy begin behind them, each by itself."""
    worker.arrive("r", PROMPT, local=48)
    worker.until_loaded("r")
    assert device.loads == [(48, 48)]
    assert not worker.kv[:3].any() and worker.kv[3:6].all()


def test_a_load_whose_adapter_is_replaced_while_it_is_copied_fails(worker, device):
    worker.arrive("r", PROMPT)
    device.is_held = True
    worker.step()
    load = worker.worker._requests["r"].load
    load.job = replace(load.job, adapter=Adapter(1, "weights", since=1))  # vLLM has another one by now
    device.is_held = False
    assert worker.step() == {"r"}
    assert "AdapterReplaced" in reason(worker)


def test_an_aborted_load_holds_up_no_step_and_keeps_its_blocks_and_lease_until_its_copy_has_ended(worker, device):
    request = worker.arrive("aborted", PROMPT)
    device.is_held = True
    worker.step()
    assert worker.engine.side.ended(request, ([1, 2, 3, 4, 5, 6],))[0] is False
    for _ in range(3):  # a step that waited for the copy would fail in its ``wait``
        assert worker.step() == set(), "vLLM would give the blocks to others while the copy writes them"
    assert worker.engine.gauge("read_leases") == 1
    worker.arrive("other", STORED + text(2, 32), first_block=20)
    worker.step()
    device.is_held = False
    assert worker.step() == {"aborted", "other"}
    worker.engine.settle()
    assert worker.engine.gauge("read_leases") == 0
    assert worker.engine.report("other")["exact_tokens"] == 96 and worker.failed() == []


@pytest.mark.parametrize("is_loading", [True, False])
def test_maps_that_a_load_has_made_for_a_request_that_is_aborted_are_not_kept(worker, device, is_loading):
    """The load may have ended on the worker before the scheduler hears of that, and the maps wait for saves."""
    request = worker.arrive("r", PROMPT)
    device.is_held = is_loading
    worker.step() if is_loading else worker.until_loaded("r")
    record = worker.worker._requests["r"] if is_loading else worker.worker._record("r")
    worker.worker._saves.keep_maps(record, {Span(32, 96): HostCopy(torch.zeros(1))})
    assert worker.engine.side.ended(request, ([1, 2, 3, 4, 5, 6],))[0] is False
    worker.step()
    assert not record.maps
    device.is_held = False


class Late(HostCopy):
    """A number that arrives when the device has computed, which is when the test says so."""

    has_computed = False

    @property
    def has_arrived(self):
        return Late.has_computed


@pytest.mark.parametrize("ends", ["aborted", "failed", "served"])
@pytest.mark.parametrize("is_beside_others", [False, True], ids=["alone", "beside another connector"])
def test_beside_another_connector_a_load_ends_when_forwards_have_that_write_its_blocks(
    worker, monkeypatch, is_beside_others, ends
):
    """Another connector writes freed blocks at once; BlendHub's own copies follow the forwards."""
    launched = []

    def forward(chosen):
        launched.append(chosen)
        if ends == "failed":
            raise torch.OutOfMemoryError("in the last layer")

    monkeypatch.setattr(forwards, "HostCopy", Late)
    monkeypatch.setattr(Late, "has_computed", False)
    monkeypatch.setattr(worker.model, "forward", forward)
    worker.worker._context.is_beside_others = is_beside_others
    request, loaded = worker.arrive("r", text(3, 32) + STORED + text(1, 32)), set()
    until = time.monotonic() + 30
    while not launched and time.monotonic() < until:
        loaded |= worker.step()
    if ends == "aborted" and not loaded:
        worker.engine.side.ended(request, (list(range(1, 9)),))
    for _ in range(5):
        loaded |= worker.step()
    assert launched and loaded == (set() if is_beside_others else {"r"})
    Late.has_computed = True
    assert loaded | worker.step() == {"r"}


def test_a_copy_that_fails_keeps_its_blocks_until_it_has_ended_and_one_that_does_not_end_is_said_once(
    worker, device, caplog
):
    worker.arrive("r", PROMPT)
    device.is_held, device.error = True, RuntimeError("the device is lost")
    worker.step()
    worker.worker._requests["r"].load._warn_at = 0.0
    for _ in range(3):
        assert worker.step() == set()
    assert caplog.text.count("the copy of request r has not ended") == 1
    device.is_held = False
    assert worker.step() == {"r"}
    assert "the device is lost" in reason(worker)


def test_a_load_waits_for_the_worker_s_session_no_longer_than_the_timeout(worker, monkeypatch):
    """How long it waits for a hub that stands still, test_engine_stopped_hub.py has."""
    worker.arrive("r", PROMPT)
    monkeypatch.setattr(worker.worker, "_open", lambda: None)
    begun = time.monotonic()
    worker.until_loaded("r")
    assert time.monotonic() - begun < SETTINGS.lookup_timeout_s
    assert "DeadlineExceeded" in reason(worker)


def test_nothing_is_copied_from_an_arena_of_another_registration(worker, device):
    """The session's thread registers with a restarted hub at any moment, also between two looks of the worker."""
    worker.arrive("r", PROMPT)
    client = worker.worker._client
    other = msgspec.structs.replace(client.registered, arena=msgspec.structs.replace(client.arena.name, nonce="later"))
    client._registered, registered = other, client.registered
    assert worker.step() == set() and not device.loads
    client._registered = registered
    worker.until_loaded("r")
    assert len(device.loads) == 1


def test_the_lease_ends_when_the_last_rank_has_copied(worker, monkeypatch):
    now = LoadProgress.PENDING
    monkeypatch.setattr(worker.worker._ranks, "least", lambda numbers: [min(number, now) for number in numbers])
    worker.arrive("r", PROMPT)
    for _ in range(3):
        assert worker.step() == set() and worker.engine.gauge("read_leases") == 1, "the other rank still copies"
    now = LoadProgress.PROVEN
    worker.until_loaded("r")
    assert worker.engine.gauge("read_leases") == 0
    assert worker.failed() == [] and worker.engine.report("r")["exact_tokens"] == 96


def test_what_was_copied_under_a_lease_that_has_ended_proves_nothing_and_vllm_computes_it(worker, device):
    device.is_held = True
    worker.arrive("r", PROMPT)
    worker.step()
    worker.engine.side.client._join()  # the session ends, as if the scheduler's process had stood still
    assert worker.engine.gauge("read_leases") == 0
    device.is_held = False
    worker.until_loaded("r")
    assert "LeaseError" in reason(worker) and worker.engine.report("r")["exact_tokens"] == 0


@pytest.mark.slow
def test_a_restarted_hub_s_arena_is_pinned_when_no_copy_is_left_in_the_earlier_one_whose_loads_fail(device, tmp_path):
    hub = HubProcess(tmp_path)
    engine = PlayedEngine(None, HubAddress(hub.endpoint, PluginChoice("zmq")), rank=-1)
    with HubClient(hub.endpoint, host=HOST) as writer:
        writer.register("engine", NAMESPACE, 0)
        writer.commit(writer.reserve(np.asarray(STORED, np.uint32), Span(0, 96)).result().right, 96).result()
    with worker_of(engine, device) as worker:
        worker.arrive("copying", PROMPT, first_block=20)
        device.is_held = True
        worker.step()
        worker.arrive("r", PROMPT)
        clients = [engine.client, engine.side.client, worker.worker._client]
        before = engine.client.epoch
        hub.kill()
        hub.start()
        wait_until(lambda: all(client.is_up and client.epoch != before for client in clients), 30.0)
        assert worker.step() == set() and device.pins == 1, "the device still copies in the earlier arena"
        device.is_held = False
        loaded: set[str] = set()
        until = time.monotonic() + 30
        while loaded != {"copying", "r"}:
            assert time.monotonic() < until
            loaded |= worker.step()
        assert device.pins == 2 and sorted(worker.failed()) == ["copying", "r"]
        assert "StaleEpoch" in engine.report("r")["reason"] and not worker.kv[:6].any()
    engine.close()
    hub.kill()


def test_an_arena_that_cannot_be_pinned_costs_loads_and_saves_and_no_step(device):
    device.error = RuntimeError("CUDA error: out of memory")
    with played_worker(device, STORED) as worker:
        worker.arrive("r", PROMPT)
        worker.until_loaded("r")
        assert "out of memory" in reason(worker)
        save = SaveJob("s", WriteRight(1, 2, "nonce", 3), Slot(Span(0, 32), 0), (np.arange(2),))
        worker.worker.save(StepPlan(saves=[save], ending={"s"}))
        assert worker.worker.finished() == ({"s"}, set())
        assert worker.worker.take_report().failed_saves == {"RuntimeError": 1}


@pytest.mark.parametrize("samples_last", [False, True], ids=["V2", "V1 on a GPU"])
def test_a_step_s_tokens_do_not_wait_for_what_is_recomputed_beside_it(worker, monkeypatch, samples_last):
    """vLLM's V1 runner samples after the connector's load; so in its steps recomputation comes after the tokens."""
    order = []
    monkeypatch.setattr(worker.model, "samples_last", samples_last)
    monkeypatch.setattr(
        worker.worker._forwards, "step", lambda blends, budget: order.append(f"recompute {budget}") or 0
    )
    for budget in (7, 8, 9):
        plan = StepPlan(budget=budget, computes=budget < 9)
        worker.worker.begin_step(plan)
        order.append("forward")
        worker.worker.load(plan)
        order.append("tokens")
    usual = "forward, recompute 7, tokens, forward, recompute 8, tokens, forward, recompute 9, tokens"
    late = "forward, tokens, recompute 7, forward, tokens, recompute 8, forward, recompute 9, tokens"
    assert ", ".join(order) == (late if samples_last else usual)
