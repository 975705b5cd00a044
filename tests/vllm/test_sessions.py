"""A process's sessions with a real hub: one a namespace, and no more than a process should hold."""

import msgspec
import numpy as np
import pytest

pytest.importorskip("vllm", reason="the adapter's tests need vLLM; `make setup` installs it")

from blendhub import PluginHost, Span
from blendhub.config import HubConfig
from blendhub.errors import BlendHubError
from blendhub.hub.embedded import HubInThread
from blendhub.layout import KVLayout, Namespace
from blendhub.plugin_choice import PluginChoice
from blendhub.vllm import sessions
from blendhub.vllm.messages import HubAddress
from blendhub.vllm.sessions import Sessions

HOST = PluginHost.discover()
LAYOUT = KVLayout(layers=1, kv_heads=1, key_dim=4, value_dim=4, dtype="float32", chunk_tokens=8)
BASE = Namespace(model="m", layout=LAYOUT, matchers=(PluginChoice("prefix"),))
TOKENS = np.arange(8, dtype=np.uint32)


@pytest.fixture(scope="module")
def hub():
    with HubInThread(HubConfig(arena_gib=0.001, metrics=""), HOST) as made:
        yield made


@pytest.fixture
def opened(hub):
    made = Sessions(HubAddress(hub.inproc_endpoint, PluginChoice("inproc")), "engine", 0, HOST)
    yield made
    made.close()


def salted(salt: str) -> Namespace:
    return msgspec.structs.replace(BASE, cache_salt=salt)


def sessions_of(hub) -> float:
    with hub.connect() as client:
        return client.stats().gauges["sessions"]


def store(client) -> None:
    reserved = client.reserve(TOKENS, Span(0, 8))
    client.commit(reserved.right, 8)


def found(client) -> bool:
    return bool(client.lookup(TOKENS, acquire=False).matches)


def test_a_namespace_has_one_session(opened):
    assert opened.open(salted("a")) is opened.open(salted("a"))
    assert opened.open(salted("a")) is not opened.open(salted("b"))


def test_what_one_namespace_stored_no_other_finds(opened):
    store(opened.open(salted("mine")))
    assert found(opened.open(salted("mine")))
    assert not found(opened.open(salted("yours")))


def test_clear_forgets_what_is_stored_in_all_of_them(opened):
    clients = [opened.open(salted(salt)) for salt in ("first", "second")]
    for client in clients:
        store(client)
    opened.clear()
    assert not any(found(client) for client in clients)


def test_what_was_longest_not_used_is_closed(opened, hub, monkeypatch):
    monkeypatch.setattr(sessions, "MOST_SESSIONS", 3)
    before = sessions_of(hub)
    clients = {salt: opened.open(salted(salt)) for salt in "abc"}
    assert opened.open(salted("a")) is clients["a"]
    opened.open(salted("d"))
    assert sessions_of(hub) == before + 3
    assert [opened.open(salted(salt)) is clients[salt] for salt in "ac"] == [True, True]
    with pytest.raises(BlendHubError):
        clients["b"].lookup(TOKENS)
    assert opened.open(salted("b")) is not clients["b"]


def test_close_leaves_the_hub_without_these_sessions(opened, hub):
    before = sessions_of(hub)
    clients = [opened.open(salted(salt)) for salt in "xyz"]
    opened.close()
    assert sessions_of(hub) == before
    for client in clients:
        with pytest.raises(BlendHubError):
            client.lookup(TOKENS)


def test_a_namespace_that_the_hub_refuses_leaves_nothing_open(opened, hub):
    before = sessions_of(hub)
    strange = msgspec.structs.replace(BASE, matchers=(PluginChoice("nobody"),))
    for _ in range(2):
        with pytest.raises(BlendHubError, match="nobody"):
            opened.open(strange)
    assert sessions_of(hub) == before
    assert opened.open(BASE).is_up


def test_a_hub_that_is_not_there_is_said_to_be():
    nowhere = Sessions(HubAddress("inproc://nobody-listens", PluginChoice("inproc")), "engine", 0, HOST)
    with pytest.raises(BlendHubError):
        nowhere.open(BASE)
    nowhere.close()
