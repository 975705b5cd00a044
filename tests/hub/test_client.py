"""A client of a hub: its rights to write end for good, and it carries on after whatever goes wrong."""

import msgspec
import pytest

from blendhub.client import wire
from blendhub.client.write_rights import MAX_ENDED, WriteRight, WriteRights
from blendhub.core.errors import LeaseError, ProtocolError
from blendhub.hub.config import HubConfig
from blendhub.hub.embedded import HubInThread
from tests.hub.hub_direct import namespace, tokens
from tests.hub.processes import store, until

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
