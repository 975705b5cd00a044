"""The thread that asks the hub: real hubs that are down, come, stand still and go."""

import logging
import threading
import time

import numpy as np
import pytest
from blendhub.vllm.hub_executor import HubExecutor

from blendhub import PluginHost, Span
from blendhub.client.hub_client import HubClient
from blendhub.core.errors import DeadlineExceeded, PeerGone
from blendhub.core.layout import KVLayout, Namespace
from blendhub.core.plugin_choice import PluginChoice
from blendhub.hub.config import HubConfig
from blendhub.hub.embedded import HubInThread
from blendhub.vllm import hub_executor as module
from blendhub.vllm.messages import HubAddress, HubPlace
from tests.hub.processes import HubProcess
from tests.vllm.standing_still import standing_still

HOST = PluginHost.discover()
LAYOUT = KVLayout(layers=1, kv_heads=1, key_dim=4, value_dim=4, dtype="float32", chunk_tokens=8)
HOME = Namespace(model="m", layout=LAYOUT, matchers=(PluginChoice("prefix"),))
TOKENS = np.arange(8, dtype=np.uint32)


def start(address: HubAddress) -> HubExecutor:
    executor = HubExecutor(HubPlace(address, HOME), "engine", 0, HOST)
    executor.reach()
    return executor


def eventually(holds, seconds: float = 10.0):
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.fixture
def hub():
    with HubInThread(HubConfig(arena_gib=0.001, metrics="", silence_s=2.0), HOST) as hub:
        yield hub


@pytest.fixture
def executor(hub):
    """It has stored some tokens."""
    executor = start(HubAddress(hub.endpoint, hub.transport))
    executor.client.commit(executor.client.reserve(TOKENS, Span(0, 8)).result().right, 8).result()
    assert found(executor.client)
    yield executor
    executor.close()


def found(client) -> bool:
    return bool(client.lookup(TOKENS, acquire=False).result().matches)


def test_while_the_hub_stands_still_everything_fails_at_once_and_no_lease_is_left(hub, executor):
    client = executor.client
    with standing_still(hub):
        client.lookup(TOKENS).close()  # nobody wants the reply
        with pytest.raises(DeadlineExceeded):
            client.lookup(TOKENS, timeout=0.05).result()
        started = time.monotonic()
        assert not client.is_up
        with pytest.raises(PeerGone):
            executor.run(lambda client: client).result(5)
        assert time.monotonic() - started < 1
    eventually(lambda: client.is_up)
    eventually(lambda: client.stats().result().gauges["read_leases"] == 0)


def test_what_ends_a_lease_and_is_lost_while_the_hub_stands_still_ends_it_when_it_goes_on(hub, executor):
    with HubClient(hub.endpoint, hub.transport.name, hub.transport.options, host=HOST, timeout=0.1) as client:
        client.register("another", HOME, 0)
        written, unwritten = (client.reserve(TOKENS + first, Span(0, 8)).result().right for first in (100, 200))
        sent, unsent = client.lookup(TOKENS), client.lookup(TOKENS)
        assert sent.result().lease and unsent.result().lease
        with standing_still(hub):
            sent.close()
            with pytest.raises(DeadlineExceeded):
                client.commit(written, 8).result()
            unsent.close()
            with pytest.raises(PeerGone):
                client.abort(unwritten)
        eventually(lambda: executor.client.stats().result().gauges["read_leases"] == 0)
        eventually(lambda: executor.client.stats().result().gauges["write_leases"] == 0)
        assert client.registrations == 1, "leases of its other requests were to end, too"


def test_nothing_is_used_between_the_request_to_clear_and_the_clear_which_is_repeated_if_it_fails(
    executor, monkeypatch
):
    monkeypatch.setattr(module, "RETRY_S", 0.05)
    clear, tries, hold = executor.client.clear, [], threading.Event()

    def fails_once():
        assert executor.is_clearing
        tries.append(None)
        if len(tries) == 1:
            raise PeerGone("not now")
        clear()

    monkeypatch.setattr(executor.client, "clear", fails_once)
    executor.run_later(hold.wait)
    executor.clear()
    called = executor.run(found)
    hold.set()
    with pytest.raises(PeerGone, match="not cleared"):  # a lookup would find what is to be forgotten
        called.result(5)
    eventually(lambda: not executor.is_clearing)
    assert not executor.run(found).result(5) and tries == [None, None]


@pytest.mark.slow
def test_a_hub_that_comes_later_is_found_and_both_are_said_once(tmp_path, caplog):
    away = HubProcess(tmp_path)
    away.kill()
    with caplog.at_level(logging.INFO, logger="blendhub"):
        executor = start(HubAddress(away.endpoint, PluginChoice("zmq")))
        with pytest.raises(PeerGone, match=away.endpoint):
            executor.run(found).result(5)
        time.sleep(2.5 * module.RETRY_S)
        away.start()
        eventually(lambda: executor.client.is_up)
        executor.close()
    away.kill()
    said = [record for record in caplog.records if away.endpoint in record.message]
    assert [record.levelname for record in said] == ["WARNING", "INFO"]
