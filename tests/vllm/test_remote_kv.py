"""KV through the transport: a hub whose memory cannot be mapped, and a worker's own memory in its place."""

import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from blendhub_cpu import CpuOptions
from blendhub_cpu.device import CpuDevice

from blendhub import Span
from blendhub.client.arena_view import SHM
from blendhub.client.hub_client import HubClient
from blendhub.core.errors import PeerGone
from blendhub.core.layout import Variant
from blendhub.core.plugin_choice import PluginChoice
from blendhub.hub.config import HubConfig, Listen
from blendhub.hub.embedded import HubInThread
from blendhub.vllm.decision import Decision
from blendhub.vllm.messages import HubAddress, LoadJob, SaveJob
from blendhub.vllm.model.layer_groups import attach
from blendhub.vllm.spans import clipped
from blendhub.vllm.worker.layer_copies import LayerCopies
from blendhub.vllm.worker.remote_kv import RemoteKV
from tests.vllm.one_group import one_group, pages_in
from tests.vllm.played_engine import BLOCK, HOST, LAYOUT, NAMESPACE, PlayedEngine, text
from tests.vllm.played_worker import Model, NotingDevice, worker_of

TOKENS = np.asarray(text(0, 96), np.uint32)
FROM, TO = np.arange(1, 7), np.arange(11, 17)
"""Blocks of 96 tokens."""


@pytest.fixture
def hub(tmp_path):
    """Listens at a socket, and its segment cannot be opened any more."""
    config = HubConfig(arena_gib=0.01, metrics="", listen=(Listen(endpoint=f"ipc://{tmp_path}/hub.sock"),))
    with HubInThread(config, HOST) as hub:
        (SHM / hub.hub.service.state.cache.arena.name.segment).unlink()
        yield hub


@pytest.fixture
def client(hub):
    with HubClient(hub.hub.config.listen[0].endpoint, host=HOST) as client:
        client.register("engine", NAMESPACE, 0)
        assert client.arena is None
        yield client


@pytest.fixture
def model():
    model = Model()
    torch.manual_seed(0)
    model.kv.copy_(torch.randn_like(model.kv))
    return model


def remote_of(model, n_slots):
    device = CpuDevice(CpuOptions())
    groups = one_group(LAYOUT, BLOCK)
    attach(device, groups, pages_in(model, LAYOUT, BLOCK))
    return RemoteKV(LayerCopies(device, groups), n_slots)


def save(remote, client, reserved, start, end):
    """Save a part of the reserved span, in as many rounds as staging memory makes of it."""
    slots = tuple(slot for slot in reserved.slots if len(clipped(Span(start, end), slot.span)))
    job = SaveJob("r", reserved.right, slots, Span(start, end), (FROM,))
    while job:
        delivery = remote.save(job)
        delivery.copy.wait()
        delivery.send(client)
        delivery.close()
        client.commit(reserved.right, delivery.job.span.end)
        job = delivery.rest


def job_of(found):
    return LoadJob("r", Variant(), TOKENS, (TO,), Decision(0, 96, found.matches, 0.0), found.lease, 0, found.pieces)


def load(remote, client):
    found = client.lookup(TOKENS)
    remote.load(client, job_of(found)).wait()
    client.release(found.lease)


@pytest.mark.parametrize("n_slots", [2, 8], ids=["in several rounds", "at once"])
@pytest.mark.parametrize("ends", [(64, 96), (20, 40, 96)], ids=["whole slots", "parts of slots"])
def test_what_is_saved_is_loaded_bit_for_bit(n_slots, ends, client, model):
    remote = remote_of(model, n_slots)
    reserved, start = client.reserve(TOKENS, Span(0, 96)), 0
    for end in ends:
        save(remote, client, reserved, start, end)
        start = end
    load(remote, client)
    assert model.kv[TO].equal(model.kv[FROM])
    # Of every save the slots that it touched, and those that were loaded.
    assert remote.take_bytes() >= (3 + 3) * LAYOUT.shard_bytes
    assert remote.take_bytes() == 0


def test_a_save_that_finds_no_room_waits_until_another_one_is_sent(client, model):
    remote = remote_of(model, 2)
    reserved = client.reserve(TOKENS, Span(0, 96))
    job = SaveJob("r", reserved.right, reserved.slots, Span(0, 96), (FROM,))
    delivery = remote.save(job)
    assert delivery.job.span == Span(0, 64) and delivery.rest.span == Span(64, 96)
    assert remote.save(delivery.rest) is None
    delivery.copy.wait()
    delivery.close()
    assert remote.save(delivery.rest).rest is None


def test_requests_that_fill_their_slots_over_many_steps_need_no_room_between_them(client, model):
    remote = remote_of(model, 2)
    reserved = [client.reserve(np.roll(TOKENS, n), Span(0, 96)) for n in range(8)]
    for start in range(0, 96, 12):
        for one in reserved:
            save(remote, client, one, start, start + 12)
    load(remote, client)
    assert model.kv[TO].equal(model.kv[FROM])


def test_a_copy_that_cannot_begin_takes_no_room(client, model, monkeypatch):
    remote = remote_of(model, 2)
    reserved = client.reserve(TOKENS, Span(0, 64))

    def fail(segments, tables):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(remote._copies, "save", fail)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="out of memory"):
            save(remote, client, reserved, 0, 64)
    monkeypatch.undo()
    save(remote, client, reserved, 0, 64)


def test_a_hub_that_stops_answering_fails_the_load_at_once(client, model):
    remote = remote_of(model, 8)
    save(remote, client, client.reserve(TOKENS, Span(0, 96)), 0, 96)
    transfer = remote.load(client, job_of(client.lookup(TOKENS)))
    transfer._reply = SimpleNamespace(done=lambda: False)  # as if the answer were lost
    assert not transfer.done()
    client._down.set()
    assert transfer.done()
    with pytest.raises(PeerGone, match="does not answer"):
        transfer.wait()


def test_a_worker_loads_through_the_transport_and_counts_it(hub):
    with hub.connect() as writer:  # from the hub's own process, where the memory is mapped
        writer.register("writer", NAMESPACE, 0)
        reserved = writer.reserve(TOKENS, Span(0, 96))
        for slot in reserved.slots:
            writer.put(reserved.right, slot.span.start, np.full(LAYOUT.shard_bytes, 1, np.uint8).data)
        writer.commit(reserved.right, 96)
    engine = PlayedEngine(hub, HubAddress(hub.hub.config.listen[0].endpoint, PluginChoice("zmq")), rank=-1)
    device = NotingDevice()
    with worker_of(engine, device) as worker:
        worker.start()
        worker.arrive("r", text(0, 96) + text(1, 32), local=16)
        until = time.monotonic() + 20
        while "r" not in worker.step():
            assert time.monotonic() < until
        assert device.noted == [(16, 16)], "what vLLM has cached is overwritten"
        assert worker.model.kv[2:7].all() and not worker.model.kv[7:].any() and not worker.model.kv[:2].any()
        assert engine.counters["requests_exact"] == 1
        worker.step()
        assert engine.counters["carried_bytes"] == 3 * LAYOUT.shard_bytes
    engine.close()
