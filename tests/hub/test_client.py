"""A client of a hub whose clock the test sets."""

import asyncio
import threading
import time

import pytest
from blendhub_transports.inproc import InprocTransport
from blendhub_transports.options import InprocOptions
from hub_direct import DirectHub, marks, namespace, tokens
from processes import until

from blendhub.client import wire
from blendhub.client.arena_view import ArenaName
from blendhub.client.hub_client import HubClient
from blendhub.core.errors import (
    DeadlineExceeded,
    HubError,
    InvalidInput,
    LeaseError,
    PeerGone,
    ProtocolError,
    UnknownSession,
)
from blendhub.core.spans import Span
from blendhub.hub.config import HubConfig
from blendhub.hub.handlers.sessions import PONG
from blendhub.testing.transports.base import Running

ENDPOINT = "inproc://a-client-test"


@pytest.fixture
def served(hub):
    running = Running(InprocTransport(InprocOptions()), ENDPOINT, hub.service)
    yield hub, running
    running.stop()


def silence(hub: DirectHub, running: Running) -> None:
    """Let so much time pass that the hub ends every session."""

    async def pass_time() -> None:
        hub.now += 100
        hub.service.tick()

    running.run(pass_time())


@pytest.mark.parametrize("rank", [0, -1])
def test_a_client_registers_once_again_however_much_was_under_way(served, rank):
    hub, running = served
    with HubClient(ENDPOINT, "inproc") as client:
        client.register("e", namespace(), rank=rank)
        under_way = [client.submit_lookup(tokens(1, 64)) for _ in range(3)]
        for lookup in under_way:
            lookup.result()
        silence(hub, running)
        under_way = [client.submit_lookup(tokens(1, 64)) for _ in range(3)]
        for lookup in under_way:
            with pytest.raises(UnknownSession):
                lookup.result()
        until(lambda: client.is_up)
        assert client.registrations == 2 and client.stats().gauges["sessions"] == 1
        client.lookup(tokens(1, 64))


def test_a_client_is_one_session(served):
    with HubClient(ENDPOINT, "inproc") as client:
        with pytest.raises(InvalidInput, match="world size"):
            client.register("e", namespace(), rank=5)
        client.register("e", namespace())
        with pytest.raises(HubError, match="already"):
            client.register("e", namespace())


def test_a_lease_is_not_given_up_while_it_is_written(served):
    text = tokens(1, 64)
    with HubClient(ENDPOINT, "inproc", timeout=0.3) as client:
        client.register("e", namespace(), rank=0)
        reserved = client.reserve(text, Span(0, 64))
        writing, done = threading.Event(), threading.Event()

        def write() -> None:
            with client.writing(reserved.right):
                writing.set()
                done.wait(10)
                for slot in reserved.slots:
                    client.shard(slot.slot)[: 4 * len(slot.span)] = marks(text, slot.span, 0)

        writer = threading.Thread(target=write)
        writer.start()
        writing.wait(10)
        with pytest.raises(HubError, match="has not ended"):
            client.abort(reserved.right)
        assert client.stats().gauges["write_leases"] == 1
        done.set()
        writer.join()
        client.abort(reserved.right)
        gauges = client.stats().gauges
        assert gauges["write_leases"] == 0 and gauges["arena_free_bytes"] == gauges["arena_bytes"]


def test_a_hub_that_answers_nonsense_is_a_typed_error(served, monkeypatch):
    hub, _running = served
    with HubClient(ENDPOINT, "inproc") as client:
        client.register("e", namespace(), rank=0)
        monkeypatch.setitem(hub.service._handlers, wire.Lookup, lambda *_: wire.Done())
        with pytest.raises(ProtocolError, match="answered Done where Found was expected"):
            client.lookup(tokens(1, 64))


@pytest.mark.parametrize("seconds", [-1.0, 0.0, 1e-9, float("nan"), float("inf")])
def test_how_often_a_hub_may_ask_for_pings_is_bounded(seconds):
    name = ArenaName("blendhub-0-0123456789abcdef", "nonce", 4096)
    answer = wire.Registered(session=1, epoch=1, arena=name, ping_every_s=seconds)
    with pytest.raises(ProtocolError, match="ping_every_s"):
        wire.client_codec().decode(wire.hub_codec().encode(answer))


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
        client.lookup(tokens(1, 64))


def end_epoch(hub: DirectHub, running: Running) -> None:
    """End the hub's epoch, as a hub that was restarted at the same endpoint does."""
    hub.state.sessions.epoch += 1


@pytest.mark.parametrize(
    ("lose", "why"), [(silence, "was silent for too long"), (end_epoch, "belongs to an earlier hub")]
)
def test_calls_between_two_sessions_say_that_the_hub_answers_and_why_the_session_is_registered_anew(served, lose, why):
    hub, running = served
    with HubClient(ENDPOINT, "inproc", background=False) as client:
        client.register("e", namespace(), rank=0)
        lose(hub, running)
        with pytest.raises(HubError):
            client.lookup(tokens(1, 64))
        with pytest.raises(PeerGone, match=f"hub at {ENDPOINT} was restarted or has ended .* anew: .*{why}"):
            client.lookup(tokens(1, 64))
        client.keep_alive()
        client.lookup(tokens(1, 64))


@pytest.mark.alone
def test_writes_do_not_wait_while_the_client_asks_the_hub(served, monkeypatch):
    """Nor do other calls: they fail at once while the session is registered anew."""
    hub, running = served
    asked, answer = threading.Event(), threading.Event()

    async def slowly(*arguments):
        asked.set()
        await asyncio.to_thread(answer.wait, 10)
        return await register(*arguments)

    with HubClient(ENDPOINT, "inproc") as client:
        client.register("e", namespace(), rank=0)
        reserved = client.reserve(tokens(1, 64), Span(0, 64))
        register = hub.service._register
        monkeypatch.setattr(hub.service, "_register", slowly)
        silence(hub, running)
        with pytest.raises(UnknownSession):
            client.lookup(tokens(1, 64))
        assert asked.wait(10)
        started = time.monotonic()
        with pytest.raises(LeaseError), client.writing(reserved.right):
            pass
        with pytest.raises(PeerGone):
            client.lookup(tokens(1, 64))
        with pytest.raises(PeerGone):
            client.submit_release(1).result()
        assert time.monotonic() - started < 0.1 and not client.is_up
        answer.set()
        until(lambda: client.is_up)


@pytest.mark.alone
def test_a_hub_that_does_not_answer_in_time_is_asked_by_the_client_alone(served, monkeypatch):
    hub, _running = served
    answer, pings = threading.Event(), []

    def ping(*arguments):
        pings.append(arguments)
        return PONG

    async def never(*arguments):
        await asyncio.to_thread(answer.wait, 10)

    with HubClient(ENDPOINT, "inproc", timeout=0.2) as client:
        client.register("e", namespace(), rank=0)
        monkeypatch.setitem(hub.service._handlers, wire.Lookup, never)
        monkeypatch.setitem(hub.service._handlers, wire.Ping, never)
        with pytest.raises(DeadlineExceeded):
            client.lookup(tokens(1, 64))
        started = time.monotonic()
        for _ in range(50):
            with pytest.raises(PeerGone, match=f"does not answer: .* blendhub top --once --endpoint {ENDPOINT}"):
                client.lookup(tokens(1, 64))
        assert time.monotonic() - started < 0.2
        monkeypatch.setitem(hub.service._handlers, wire.Ping, ping)
        until(lambda: client.is_up)
        assert pings
        answer.set()
