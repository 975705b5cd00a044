"""A client of a hub whose clock the test sets."""

import pytest
from blendhub_transports.inproc import InprocTransport
from blendhub_transports.options import TransportOptions

from blendhub.client import wire
from blendhub.client.hub_client import HubClient
from blendhub.core.errors import (
    HubError,
    PeerGone,
    ProtocolError,
    UnknownSession,
)
from blendhub.hub.config import HubConfig
from blendhub.testing.transports.base import Running
from tests.hub.hub_direct import DirectHub, namespace, tokens
from tests.hub.processes import until

ENDPOINT = "inproc://a-client-test"


@pytest.fixture
def served(hub):
    running = Running(InprocTransport(TransportOptions()), ENDPOINT, hub.service)
    yield hub, running
    running.stop()


def silence(hub: DirectHub, running: Running) -> None:
    """Let so much time pass that the hub ends every session."""

    async def pass_time() -> None:
        hub.now += 100
        hub.service.tick()

    running.run(pass_time())


def test_a_client_registers_once_again_however_much_was_under_way(served):
    hub, running = served
    with HubClient(ENDPOINT, "inproc") as client:
        client.register("e", namespace(), rank=0)
        under_way = [client.lookup(tokens(1, 64)) for _ in range(3)]
        for lookup in under_way:
            lookup.result()
        silence(hub, running)
        under_way = [client.lookup(tokens(1, 64)) for _ in range(3)]
        for lookup in under_way:
            with pytest.raises(UnknownSession):
                lookup.result()
        until(lambda: client.is_up)
        assert client.registrations == 2 and client.stats().gauges["sessions"] == 1
        client.lookup(tokens(1, 64)).result()


def test_a_hub_that_answers_nonsense_is_a_typed_error(served, monkeypatch):
    hub, _running = served
    with HubClient(ENDPOINT, "inproc") as client:
        client.register("e", namespace(), rank=0)
        monkeypatch.setitem(hub.service._handlers, wire.Lookup, lambda *_: wire.Done())
        with pytest.raises(ProtocolError, match="answered Done where Found was expected"):
            client.lookup(tokens(1, 64)).result()


def end_epoch(hub: DirectHub, running: Running) -> None:
    """End the hub's epoch, as a hub that was restarted at the same endpoint does."""
    hub.state.sessions.epoch += 1


@pytest.mark.parametrize(
    ("lose", "why"), [(silence, "was silent for too long"), (end_epoch, "belongs to an earlier hub")]
)
def test_calls_between_two_sessions_fail_at_once_and_say_why(served, lose, why):
    hub, running = served
    with HubClient(ENDPOINT, "inproc", background=False) as client:
        client.register("e", namespace(), rank=0)
        lose(hub, running)
        with pytest.raises(HubError):
            client.lookup(tokens(1, 64)).result()
        with pytest.raises(PeerGone, match=f"no session with the hub at {ENDPOINT}: .*{why}"):
            client.lookup(tokens(1, 64)).result()
        client.keep_alive()
        client.lookup(tokens(1, 64)).result()


def test_a_client_pings_on_after_an_unexpected_error(served, monkeypatch, caplog):
    hub, _running = served
    hub.service._config = hub.service._sessions.config = HubConfig(silence_s=0.1)
    with HubClient(ENDPOINT, "inproc") as client:
        client.register("e", namespace(), rank=0)
        with monkeypatch.context() as broken:
            broken.setattr(client, "_ping", lambda: 1 / 0)
            until(lambda: not client.is_up)
            until(lambda: "division by zero" in caplog.text)
        until(lambda: client.is_up)
        client.lookup(tokens(1, 64)).result()
