"""The client that a process of vLLM has of its hub: real hubs that are down, come, stand still and go."""

import logging
import time

import numpy as np
import pytest

from blendhub import PluginHost, Span
from blendhub.client import session, wire
from blendhub.client.hub_client import HubClient
from blendhub.core.errors import DeadlineExceeded, PeerGone
from blendhub.core.layout import KVLayout, Namespace
from blendhub.core.plugin_choice import PluginChoice
from blendhub.hub.config import HubConfig
from blendhub.hub.embedded import HubInThread
from blendhub.vllm.hub_client import join_hub
from blendhub.vllm.messages import HubAddress, HubPlace
from tests.hub.processes import HubProcess
from tests.vllm.standing_still import standing_still

HOST = PluginHost.discover()
LAYOUT = KVLayout(layers=1, kv_heads=1, key_dim=4, value_dim=4, dtype="float32", chunk_tokens=8)
HOME = Namespace(model="m", layout=LAYOUT, matchers=(PluginChoice("prefix"),))
TOKENS = np.arange(8, dtype=np.uint32)


def join(address: HubAddress) -> HubClient:
    client = join_hub(HubPlace(address, HOME), "engine", 0, HOST)
    client.reach()
    return client


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
def client(hub):
    """It has stored some tokens."""
    client = join(HubAddress(hub.endpoint, hub.transport))
    client.commit(client.reserve(TOKENS, Span(0, 8)).result().right, 8).result()
    assert found(client)
    yield client
    client.close()


def found(client: HubClient) -> bool:
    return bool(client.lookup(TOKENS, acquire=False).result().matches)


def test_while_the_hub_stands_still_everything_fails_at_once_and_no_lease_is_left(hub, client):
    with standing_still(hub):
        client.lookup(TOKENS).close()  # nobody wants the reply
        with pytest.raises(DeadlineExceeded):
            client.lookup(TOKENS, timeout=0.05).result()
        assert not client.is_up
        answer = client.lookup(TOKENS)
        assert answer.done() and isinstance(answer.error, PeerGone)
    eventually(lambda: client.is_up)
    eventually(lambda: client.stats().result().gauges["read_leases"] == 0)


def test_requests_that_cannot_be_sent_leave_nothing_behind_and_all_say_what_is_the_matter(hub, client):
    """An engine may ask thousands of times before its hub comes back."""
    hub.close()
    eventually(lambda: not client.is_up)
    for _ in range(3):
        answer = client.lookup(TOKENS)
        answer.close()
        assert str(answer.error).count("no session with the hub") == 1
    assert not client._abandoned and not client._closing


def test_what_ends_a_lease_and_is_lost_while_the_hub_stands_still_ends_it_when_it_goes_on(hub, client):
    with HubClient(hub.endpoint, hub.transport.name, hub.transport.options, host=HOST, timeout=0.1) as another:
        another.register("another", HOME, 0)
        written, unwritten = (another.reserve(TOKENS + first, Span(0, 8)).result().right for first in (100, 200))
        sent, unsent = another.lookup(TOKENS), another.lookup(TOKENS)
        assert sent.result().lease and unsent.result().lease
        with standing_still(hub):
            sent.close()
            with pytest.raises(DeadlineExceeded):
                another.commit(written, 8).result()
            unsent.close()
            another.abort(unwritten)
        eventually(lambda: client.stats().result().gauges["read_leases"] == 0)
        eventually(lambda: client.stats().result().gauges["write_leases"] == 0)
        assert another.registrations == 1, "leases of its other requests were to end, too"


def test_nothing_is_used_between_the_request_to_clear_and_the_clear_which_is_repeated_if_it_fails(
    hub, client, monkeypatch
):
    monkeypatch.setattr(session, "CLEAR_RETRY_S", 0.05)
    clear, tries = hub.hub.service.clear, []

    async def fails_once(*message):
        tries.append(None)
        if len(tries) == 1:
            raise PeerGone("not now")
        return await clear(*message)

    monkeypatch.setitem(hub.hub.service._handlers, wire.Clear, fails_once)
    with standing_still(hub):
        client.clear_all()
        with pytest.raises(PeerGone, match="not cleared"):  # a lookup would find what is to be forgotten
            found(client)
        assert client.is_up, "the hub has done nothing wrong"
    eventually(lambda: not client.is_clearing)
    assert not found(client) and tries == [None, None]


@pytest.mark.slow
def test_a_hub_that_comes_later_is_found_and_both_are_said_once(tmp_path, caplog):
    away = HubProcess(tmp_path)
    away.kill()
    with caplog.at_level(logging.INFO, logger="blendhub"):
        client = join(HubAddress(away.endpoint, PluginChoice("zmq")))
        with pytest.raises(PeerGone, match=away.endpoint):
            found(client)
        time.sleep(2.5 * session.RETRY_S)
        away.start()
        eventually(lambda: client.is_up)
        client.close()
    away.kill()
    said = [record for record in caplog.records if away.endpoint in record.message]
    assert [record.levelname for record in said] == ["WARNING", "INFO"]
