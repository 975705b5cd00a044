"""What routers hear of an engine's hub through vLLM's KV cache events."""

import time

import msgspec
import numpy as np
import pytest
import zmq
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch

from blendhub import PluginHost, Span
from blendhub.client.hub_client import HubClient
from blendhub.core.layout import DEFAULT_MATCHERS, KVLayout, Namespace
from blendhub.core.plugin_choice import PluginChoice
from blendhub.vllm.hub_executor import HubExecutor
from blendhub.vllm.messages import HubAddress, HubPlace
from blendhub.vllm.scheduler.hub_events import HubEvents
from harness.engines import Engine
from tests.hub.processes import HubProcess
from tests.vllm.conftest import SETTINGS

pytestmark = pytest.mark.slow

LAYOUT = KVLayout(layers=1, kv_heads=1, key_dim=4, value_dim=4, dtype="float32", chunk_tokens=8)
HOME = Namespace(model="m", layout=LAYOUT, matchers=DEFAULT_MATCHERS)


@pytest.fixture
def hub(tmp_path):
    hub = HubProcess(tmp_path)
    yield hub
    hub.kill()


@pytest.fixture
def executor(hub):
    executor = HubExecutor(
        HubPlace(HubAddress(hub.endpoint, PluginChoice("unix")), HOME), "engine", 0, PluginHost.discover()
    )
    executor.reach()
    yield executor
    executor.close()


def taken(events, n, seconds=20.0):
    """The next events, ``n`` of them, as steps of an engine take them."""
    found, until = [], time.monotonic() + seconds
    while len(found) < n and time.monotonic() < until:
        found += events.take()
        time.sleep(0.01)
    return found


def store(executor, first):
    def work(client: HubClient):
        tokens = np.arange(first, first + 16, dtype=np.uint32)
        reserved = client.reserve(tokens, Span(0, 16))
        client.commit(reserved.right, 16)

    executor.run(work).result(10)


@pytest.mark.parametrize("blends", [True, False])
def test_a_router_hears_what_is_stored_and_what_is_gone(executor, blends):
    events = HubEvents(executor, blends)
    taken(events, 1, 0.5)  # from here on the hub keeps what happens
    store(executor, 100)
    first, second = taken(events, 2)
    assert isinstance(first, BlockStored) and first.token_ids == list(range(100, 108)) and first.medium == "CPU"
    assert second.parent_block_hash == first.block_hashes[0] and second.movable is blends
    executor.run(HubClient.clear).result(10)
    gone = taken(events, 2)
    assert all(isinstance(event, BlockRemoved) for event in gone)
    assert [event.block_hashes for event in gone] == [first.block_hashes, second.block_hashes]
    batch = msgspec.msgpack.encode(KVEventBatch(ts=1.0, events=[first, *gone]))
    stored, removed, _ = msgspec.msgpack.decode(batch, type=KVEventBatch).events
    assert type(stored) is BlockStored and stored.token_ids == first.token_ids and removed == gone[0]


def test_a_hub_that_was_restarted_holds_nothing_that_was_announced(hub, executor):
    events = HubEvents(executor, True)
    taken(events, 1, 0.5)
    store(executor, 100)
    names = {event.block_hashes[0] for event in taken(events, 2)}
    hub.kill()
    hub.start()
    gone = taken(events, 2, 40.0)
    assert {event.block_hashes[0] for event in gone} == names
    assert all(isinstance(event, BlockRemoved) for event in gone)


@pytest.mark.versions
@pytest.mark.timeout(600)
def test_an_engine_publishes_them_with_its_own(model, texts, tmp_path):
    endpoint = f"ipc://{tmp_path}/events"
    publishes = KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", endpoint=endpoint)
    context = zmq.Context()
    with Engine(model, SETTINGS, kv_events_config=publishes) as engine, context.socket(zmq.SUB) as follower:
        follower.connect(endpoint)
        follower.subscribe("")
        time.sleep(1)
        document = texts.new(256)
        engine.one(document)
        heard, until = [], time.monotonic() + 60
        while not heard and time.monotonic() < until:
            engine.one(texts.new(40))  # vLLM publishes in its steps
            while follower.poll(100):
                for event in msgspec.msgpack.decode(follower.recv_multipart()[2])[1]:
                    fields = event if isinstance(event, dict) else {"token_ids": event[3], "movable": event[-1]}
                    if fields.get("movable") is True and list(fields["token_ids"]) == document:
                        heard.append(event)
        assert heard
    context.term()
