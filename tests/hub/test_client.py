"""A client of a hub: its rights to write end for good, and it carries on after whatever goes wrong, as when its hub
stands still and goes on."""

import time

import msgspec
import pytest

from blendhub.client import session, wire
from blendhub.client.hub_client import HubClient
from blendhub.client.write_rights import MAX_ENDED, WriteRight, WriteRights
from blendhub.core.errors import Busy, DeadlineExceeded, LeaseError, PeerGone, ProtocolError
from blendhub.core.spans import Span
from blendhub.hub.config import HubConfig
from blendhub.hub.embedded import HubInThread
from tests.hub.hub_direct import CHUNK, namespace, tokens
from tests.hub.processes import store, until
from tests.vllm.standing_still import standing_still

ALL, TEXT = Span(0, CHUNK), tokens(1, CHUNK)
RIGHT = WriteRight(lease=20, epoch=1, arena="nonce", end=64)


@pytest.fixture
def rights():
    rights = WriteRights()
    rights.begin_session(1, "nonce", first=10, granted_before=(3,))
    return rights


def write(rights: WriteRights, **other: object) -> None:
    right = msgspec.structs.replace(RIGHT, **other)
    rights.begin_write(right)
    rights.end_write(right)


@pytest.mark.parametrize("ends", ["end", "revoke", "close", "end_session"])
def test_a_right_that_ended_is_refused_for_ever(rights, ends):
    arguments = {"end": (RIGHT,), "revoke": ((RIGHT.lease,),), "close": (), "end_session": ()}[ends]
    getattr(rights, ends)(*arguments)
    for first in (100, 100 + 2 * MAX_ENDED):
        with pytest.raises(LeaseError):
            write(rights)
        # What might make the process forget: it acknowledged the end, and thousands of others ended.
        rights.acknowledged(rights.to_acknowledge())
        rights.revoke(range(first, first + 2 * MAX_ENDED))
    assert len(rights._ended) <= 2 * MAX_ENDED, "what is remembered is bounded"
    if ends in ("end", "revoke"):
        write(rights, lease=100 + 4 * MAX_ENDED)
    if ends != "close":
        rights.begin_session(1, "nonce", first=30, granted_before=())
    with pytest.raises(LeaseError):
        write(rights)


def test_a_client_pings_on_after_an_unexpected_error_and_an_answer_of_nonsense_is_a_typed_error(monkeypatch, caplog):
    with HubInThread(HubConfig(arena_gib=0.001, silence_s=0.2, metrics="")) as hub, hub.connect() as client:
        client.register("e", namespace(), rank=0)
        with monkeypatch.context() as broken:
            broken.setattr(client, "_ping", lambda: 1 / 0)
            until(lambda: "division by zero" in caplog.text)
            assert not client.is_up
        until(lambda: client.is_up)
        store(client, tokens(1, 64))
        found = client.lookup(tokens(1, 64)).result()
        with pytest.raises(LeaseError, match="must not be used"), client.reading(found):
            client._join()  # ends its session, and with it the lease
        monkeypatch.setitem(hub.hub.service._handlers, wire.Lookup, lambda *_: wire.Done())
        with pytest.raises(ProtocolError, match="answered Done where Found was expected"):
            client.lookup(tokens(1, 64)).result()


# A hub that stands still.


@pytest.fixture
def running():
    with HubInThread(HubConfig(arena_gib=0.001, metrics="", silence_s=2.0)) as hub:
        yield hub


@pytest.fixture
def client(running):
    """It has stored a text."""
    with running.connect() as client:
        client.register("e", namespace(), rank=0)
        store(client, TEXT)
        assert found(client)
        yield client


def found(client):
    return client.lookup(TEXT, acquire=False).result().matches


def has_leases(client):
    gauges = client.stats().result().gauges
    return gauges["read_leases"] + gauges["write_leases"] > 0


def test_while_the_hub_stands_still_everything_fails_at_once_and_no_lease_is_left(running, client):
    with standing_still(running):
        client.lookup(TEXT).close()  # nobody wants the reply
        client.reserve(tokens(2, CHUNK), ALL).close()
        with pytest.raises(DeadlineExceeded):
            client.lookup(TEXT, timeout=0.05).result()
        started = time.monotonic()
        assert not client.is_up
        for answer in (client.lookup(TEXT), client.reserve(TEXT, ALL), client.stats(), client.report([])):
            assert answer.done() and isinstance(answer.error, PeerGone)
        assert time.monotonic() - started < 1
    until(lambda: client.is_up)
    until(lambda: not has_leases(client))


def test_requests_that_cannot_be_sent_leave_nothing_behind_and_all_say_what_is_the_matter(running, client):
    """An engine may ask thousands of times before its hub comes back."""
    running.close()
    until(lambda: not client.is_up)
    for _ in range(3):
        answer = client.lookup(TEXT)
        answer.close()
        assert str(answer.error).count("no session with the hub") == 1
    assert not client._abandoned and not client._closing


def test_what_ends_a_lease_and_is_lost_while_the_hub_stands_still_ends_it_when_it_goes_on(running, client):
    with HubClient(running.endpoint, running.transport.name, running.transport.options, timeout=0.1) as other:
        other.register("another", namespace(), rank=0)
        written, unwritten = (other.reserve(tokens(seed, CHUNK), ALL).result().right for seed in (2, 3))
        sent, unsent = other.lookup(TEXT), other.lookup(TEXT)
        assert sent.result().lease and unsent.result().lease
        with standing_still(running):
            sent.close()
            with pytest.raises(DeadlineExceeded):
                other.commit(written, CHUNK).result()
            unsent.close()
            other.abort(unwritten)
        until(lambda: not has_leases(client))
        assert other.registrations == 1, "leases of its other requests were to end, too"


def test_a_reservation_that_the_hub_answers_late_ends_no_lease_of_other_requests(running, client):
    with HubClient(running.endpoint, running.transport.name, running.transport.options, timeout=0.1) as other:
        other.register("another", namespace(), rank=0)
        found = other.lookup(TEXT)
        assert found.result().lease
        with standing_still(running):
            wanted, unwanted = (other.reserve(tokens(seed, CHUNK), ALL) for seed in (2, 3))
            unwanted.close()
            assert not wanted.done(0.3)
        right = wanted.result().right
        until(lambda: other.is_up)
        other.commit(right, CHUNK).result()
        until(lambda: client.stats().result().gauges["write_leases"] == 0)
        assert other.registrations == 1 and client.stats().result().gauges["read_leases"] == 1
        found.close()


def test_nothing_is_used_between_the_request_to_clear_and_the_clear_which_is_repeated_if_it_fails(
    running, client, monkeypatch, caplog
):
    monkeypatch.setattr(session, "CLEAR_RETRY_S", 0.05)
    clear, tries = running.hub.service.clear, []

    async def fails_once(*request):
        tries.append(request)
        if len(tries) == 1:
            raise Busy("not now")
        return await clear(*request)

    monkeypatch.setitem(running.hub.service._handlers, wire.Clear, fails_once)
    with standing_still(running):
        client.clear_all()
        assert client.is_clearing
        with pytest.raises(PeerGone, match="not cleared"):  # a lookup would find what is to be forgotten
            client.lookup(TEXT).result()
    until(lambda: client.is_up)
    assert not found(client) and len(tries) == 2 and "could not be cleared yet" in caplog.text
