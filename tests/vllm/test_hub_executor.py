"""The thread that asks the hub: real hubs that are down, come, stand still and go."""

import logging
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from blendhub import PluginHost, Span
from blendhub.core.errors import DeadlineExceeded, PeerGone
from blendhub.core.layout import KVLayout, Namespace, Variant
from blendhub.core.plugin_choice import PluginChoice
from blendhub.hub.config import HubConfig
from blendhub.hub.embedded import HubInThread
from blendhub.vllm import hub_executor as module
from blendhub.vllm.hub_executor import HubExecutor
from blendhub.vllm.messages import HubAddress, HubPlace
from tests.hub.processes import HubProcess
from tests.vllm.standing_still import standing_still

HOST = PluginHost.discover()
LAYOUT = KVLayout(layers=1, kv_heads=1, key_dim=4, value_dim=4, dtype="float32", chunk_tokens=8)
HOME = Namespace(model="m", layout=LAYOUT, matchers=(PluginChoice("prefix"),))
TOKENS = np.arange(8, dtype=np.uint32)


def start(address: HubAddress, namespace: Namespace = HOME) -> HubExecutor:
    return HubExecutor(HubPlace(address, namespace), "engine", 0, HOST)


def eventually(what, seconds: float = 10.0):
    until = time.monotonic() + seconds
    while not (found := what()) and time.monotonic() < until:
        time.sleep(0.01)
    assert found
    return found


@pytest.fixture
def hub():
    with HubInThread(HubConfig(arena_gib=0.001, metrics="", silence_s=2.0), HOST) as made:
        yield made


@pytest.fixture
def executor(hub):
    made = start(HubAddress(hub.endpoint, hub.transport))
    made.reach()
    yield made
    made.close()


def store(client) -> None:
    reserved = client.reserve(TOKENS, Span(0, 8))
    client.commit(reserved.right, 8)


def found(client) -> bool:
    return bool(client.lookup(TOKENS, acquire=False).result().matches)


def test_ten_thousand_salts_take_one_session_one_connection_and_one_thread(hub, executor):
    """What earlier tests of the process left may end meanwhile; nothing may begin."""

    def used() -> set[object]:
        links = (Path(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd"))
        return {*threading.enumerate(), *(os.readlink(link) for link in links if link.is_symlink())}

    before = used()
    for number in range(10_000):
        assert not executor.client.lookup(TOKENS, Variant(cache_salt=f"salt {number}")).result().matches
    assert not used() - before and executor.client.stats().gauges["sessions"] == 1
    assert not hub.hub.service.state.indexes


def test_while_the_hub_stands_still_everything_fails_at_once(hub, executor):
    with standing_still(hub):
        with pytest.raises(DeadlineExceeded):
            executor.client.lookup(TOKENS, timeout=0.05).result()
        started = time.monotonic()
        assert not executor.client.is_up
        with pytest.raises(PeerGone):
            executor.run(lambda client: client).result(5)
        assert time.monotonic() - started < 1
    eventually(lambda: executor.client.is_up)


def test_no_call_runs_between_the_request_to_clear_and_the_clear(executor):
    store(executor.client)
    assert found(executor.client)
    hold = threading.Event()
    executor.run_later(hold.wait)
    executor.clear()
    called = executor.run(found)
    hold.set()
    eventually(lambda: not executor.is_clearing)
    assert not called.result(5)
    assert not found(executor.client)


def test_a_clear_that_fails_is_repeated_and_nothing_is_used_before(executor, monkeypatch):
    monkeypatch.setattr(module, "RETRY_S", 0.05)
    store(executor.client)
    clear, tries = executor.client.clear, []

    def fails_once():
        assert executor.is_clearing
        tries.append(None)
        if len(tries) == 1:
            raise PeerGone("not now")
        clear()

    monkeypatch.setattr(executor.client, "clear", fails_once)
    executor.clear()
    with pytest.raises(PeerGone, match="not cleared"):  # a lookup would find what is to be forgotten
        executor.run(found).result(5)
    eventually(lambda: not executor.is_clearing)
    assert not found(executor.client)
    assert tries == [None, None]


def test_the_lease_of_a_lookup_whose_reply_nobody_wants_ends(hub, executor):
    client = executor.client
    store(client)
    with standing_still(hub):
        client.lookup(TOKENS).close()
    eventually(lambda: client.stats().gauges["read_leases"] == 1)
    eventually(lambda: client.stats().gauges["read_leases"] == 0)


@pytest.fixture
def away(tmp_path):
    """A hub in a separate process that has not started yet."""
    made = HubProcess(tmp_path)
    made.kill()
    yield made
    if made.process.poll() is None:
        made.kill()


@pytest.mark.slow
def test_a_hub_that_comes_later_is_found_and_both_are_said_once(away, caplog):
    with caplog.at_level(logging.INFO, logger="blendhub"):
        made = start(HubAddress(away.endpoint, PluginChoice("zmq")))
        made.reach()
        with pytest.raises(PeerGone, match=away.endpoint):
            made.client.check_up()
        time.sleep(2.5 * module.RETRY_S)
        away.start()
        eventually(lambda: made.client.is_up)
        assert made.client
        made.close()
    said = [record for record in caplog.records if away.endpoint in record.message]
    assert [record.levelname for record in said] == ["WARNING", "INFO"]
