"""A process's session with a real hub that stands still and goes on."""

import time

import numpy as np
import pytest

from blendhub import PluginHost, Span
from blendhub.client import session, wire
from blendhub.client.hub_client import HubClient
from blendhub.core.errors import Busy, DeadlineExceeded, PeerGone
from blendhub.core.layout import KVLayout, Namespace
from blendhub.core.plugin_choice import PluginChoice
from blendhub.hub.config import HubConfig
from blendhub.hub.embedded import HubInThread
from blendhub.vllm.hub_client import join_hub
from blendhub.vllm.messages import HubAddress, HubPlace
from tests.vllm.standing_still import standing_still

HOST = PluginHost.discover()
LAYOUT = KVLayout(layers=1, kv_heads=1, key_dim=4, value_dim=4, dtype="float32", chunk_tokens=8)
HOME = Namespace(model="m", layout=LAYOUT, matchers=(PluginChoice("prefix"),))
TOKENS = np.arange(8, dtype=np.uint32)


def start(address: HubAddress) -> HubClient:
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
    client = start(HubAddress(hub.endpoint, hub.transport))
    client.commit(client.reserve(TOKENS, Span(0, 8)).result().right, 8).result()
    assert found(client)
    yield client
    client.close()


def found(client) -> bool:
    return bool(client.lookup(TOKENS, acquire=False).result().matches)


def gauge(client, name: str) -> float:
    return client.stats().result().gauges[name]


def test_while_the_hub_stands_still_everything_fails_at_once_and_no_lease_is_left(hub, client):
    with standing_still(hub):
        client.lookup(TOKENS).close()  # nobody wants the reply
        client.reserve(TOKENS + 50, Span(0, 8)).close()
        with pytest.raises(DeadlineExceeded):
            client.lookup(TOKENS, timeout=0.05).result()
        started = time.monotonic()
        assert not client.is_up
        for answer in (client.lookup(TOKENS), client.reserve(TOKENS, Span(0, 8)), client.stats(), client.report([])):
            assert answer.done() and isinstance(answer.error, PeerGone)
        assert time.monotonic() - started < 1
    eventually(lambda: client.is_up)
    eventually(lambda: gauge(client, "read_leases") == gauge(client, "write_leases") == 0)


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
    with HubClient(hub.endpoint, hub.transport.name, hub.transport.options, host=HOST, timeout=0.1) as other:
        other.register("another", HOME, 0)
        written, unwritten = (other.reserve(TOKENS + first, Span(0, 8)).result().right for first in (100, 200))
        sent, unsent = other.lookup(TOKENS), other.lookup(TOKENS)
        assert sent.result().lease and unsent.result().lease
        with standing_still(hub):
            sent.close()
            with pytest.raises(DeadlineExceeded):
                other.commit(written, 8).result()
            unsent.close()
            other.abort(unwritten)
        eventually(lambda: gauge(client, "read_leases") == gauge(client, "write_leases") == 0)
        assert other.registrations == 1, "leases of its other requests were to end, too"


def test_a_reservation_that_the_hub_answers_late_ends_no_lease_of_other_requests(hub, client):
    with HubClient(hub.endpoint, hub.transport.name, hub.transport.options, host=HOST, timeout=0.1) as other:
        other.register("another", HOME, 0)
        found = other.lookup(TOKENS)
        assert found.result().lease
        with standing_still(hub):
            wanted, unwanted = (other.reserve(TOKENS + first, Span(0, 8)) for first in (100, 200))
            unwanted.close()
            assert not wanted.done(0.3)
        right = wanted.result().right
        eventually(lambda: other.is_up)
        other.commit(right, 8).result()
        eventually(lambda: gauge(client, "write_leases") == 0)
        assert other.registrations == 1 and gauge(client, "read_leases") == 1
        found.close()


def test_nothing_is_used_between_the_request_to_clear_and_the_clear_which_is_repeated_if_it_fails(
    hub, client, monkeypatch, caplog
):
    monkeypatch.setattr(session, "CLEAR_RETRY_S", 0.05)
    clear, tries = hub.hub.service.clear, []

    async def fails_once(*request):
        tries.append(request)
        if len(tries) == 1:
            raise Busy("not now")
        return await clear(*request)

    monkeypatch.setitem(hub.hub.service._handlers, wire.Clear, fails_once)
    with standing_still(hub):
        client.clear_all()
        assert client.is_clearing
        with pytest.raises(PeerGone, match="not cleared"):  # a lookup would find what is to be forgotten
            client.lookup(TOKENS).result()
    eventually(lambda: client.is_up)
    assert not found(client) and len(tries) == 2 and "could not be cleared yet" in caplog.text
