"""``DELETE /kv`` on the metrics port: a receipt for the hub's own user, and nothing for others."""

import asyncio
import json
import os

import pytest

from blendhub.client import wire
from blendhub.core.errors import StoreAway
from blendhub.hub.http.routes import Routes
from blendhub.hub.http.server import MetricsServer
from blendhub.hub.limits import DELETIONS_A_SECOND
from tests.hub.hub_direct import CHUNK, tokens
from tests.hub.other_users import ANOTHER_USER, request_by

A = "cmpl-a-0-1a2b3c4d"
REQUEST = "DELETE /kv?request=cmpl-a HTTP/1.1\r\nHost: localhost\r\n\r\n"


def asked(hub, *targets, method="DELETE", name="127.0.0.1:9464", address="127.0.0.1:0", by=None):
    """The status and the body of each answer; ``by`` asks in place of this process."""

    async def ask():
        service = hub.service
        routes = Routes(service.stats, service.counters, service.reports, service.forget)
        server = MetricsServer(routes.get, routes.delete)
        host, _, port = (await server.start(address)).rpartition(":")
        got = []
        for target in targets:
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            writer.write(f"{method} {target} HTTP/1.1\r\nHost: {name}\r\n\r\n".encode())
            head, _, body = (await asyncio.wait_for(reader.read(), 10)).decode().partition("\r\n\r\n")
            got.append((int(head.split()[1]), body))
            writer.close()
        if by:
            got.append(await asyncio.to_thread(by, host.strip("[]"), port))
        await server.close()
        return got

    return hub.run(ask())


@pytest.mark.parametrize("address", ["127.0.0.1:0", "[::1]:0"])
def test_the_owner_gets_a_receipt_and_may_ask_again(hub, address):
    hub.join().store(tokens(1, 3 * CHUNK), request=A)
    (first, second) = asked(hub, "/kv?request=cmpl-a", "/kv?request=cmpl-a", address=address)
    assert (first[0], json.loads(first[1])) == (200, {"tokens": 3 * CHUNK, "chunks": 3})
    assert (second[0], json.loads(second[1])) == (200, {"tokens": 0, "chunks": 0})
    hub.state.check_integrity()


def test_what_is_wrong_is_said(hub):
    answers = asked(hub, "/kv", "/kv?request=a&salt=b", "/kv?request=a&request=b", f"/kv?request={'x' * 300}", "/other")
    assert [status for status, _ in answers] == [400, 400, 400, 400, 404]
    assert "name one" in answers[0][1] and "2 times" in answers[2][1]
    ((status, _),) = asked(hub, "/kv?request=a", name="evil.example")
    assert status == 404, "a page that makes its own name mean this machine deletes nothing"
    assert [status for status, _ in asked(hub, "/kv?request=a", method="POST")] == [405]


def test_too_many_and_what_the_store_cannot_do_have_their_own_answers(hub, monkeypatch):
    answers = asked(hub, *["/kv?request=x"] * (DELETIONS_A_SECOND + 1))
    assert answers[-1][0] == 429 and {status for status, _ in answers[:-1]} == {200}

    async def away(message):
        raise StoreAway("the store does not answer")

    monkeypatch.setattr(hub.service, "forget", away)
    ((status, body),) = asked(hub, "/kv?request=x")
    assert status == 503 and "ask again" in body


def test_another_process_of_this_user_may_delete(hub):
    hub.join().store(tokens(1, CHUNK), request=A)
    (line,) = asked(hub, by=request_by(None, REQUEST))
    assert "200 OK" in line and hub.ask(wire.Forget(request=A)).tokens == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user; run the tests as root")
def test_another_user_of_this_machine_may_not(hub):
    hub.join().store(tokens(1, CHUNK), request=A)
    (line,) = asked(hub, by=request_by(ANOTHER_USER, REQUEST))
    assert "403 Forbidden" in line
    assert hub.ask(wire.Forget(request=A)).tokens == CHUNK
