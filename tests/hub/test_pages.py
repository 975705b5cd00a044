"""What the hub serves over HTTP: numbers, the page with the last requests, and deletion for the hub's own user."""

import asyncio
import os
import socket

import httpx
import pytest

from blendhub.client import wire
from blendhub.core.errors import HubError, OptionError
from blendhub.core.layout import Variant
from blendhub.hub.http.pages import pages
from blendhub.hub.http.server import http_server
from blendhub.outcome.fates import Fate
from blendhub.outcome.reasons import SENTENCES, Why
from tests.hub.hub_direct import CHUNK, DirectHub, tokens
from tests.hub.processes import run_python
from tests.hub.test_reports import report

SALT = Variant(cache_salt="s")
ANOTHER_USER = 65534
DELETE = """
import encodings.idna, os, socket, sys  # another user may not be able to import
host, port, user = sys.argv[1:]
os.setgid(int(user)), os.setuid(int(user))
with socket.create_connection((host, int(port)), timeout=10) as connection:
    connection.sendall(b"DELETE /kv?salt=s HTTP/1.1\\r\\nHost: localhost\\r\\n\\r\\n")
    print(connection.recv(65536).decode().splitlines()[0])
"""


def answers(
    hub: DirectHub, *targets: str, method: str = "GET", host: str = "127.0.0.1:9464", at: str = "127.0.0.1:0"
) -> list[httpx.Response]:
    async def ask() -> list[httpx.Response]:
        async with (
            http_server(at, pages(hub.service)) as address,
            httpx.AsyncClient(base_url=f"http://{address}", headers={"Host": host}, trust_env=False) as client,
        ):
            return [await client.request(method, target) for target in targets]

    return hub.run(ask())


def test_the_page_s_json_has_reports_and_numbers_and_nothing_of_the_text(hub):
    hub.join("first").ask(wire.Reported, reports=(report("a"), report("b", reason="why")))
    hub.join("second").ask(wire.Reported, reports=(report("c"),))
    asked = answers(hub, "/page.json", "/page.json?engine=first", "/page.json?engine=x")
    latest, first, unknown = (answer.json() for answer in asked)
    assert latest["engines"] == ["first", "second"] and latest["engine"] == unknown["engine"] == "second"
    assert [shown["request"] for shown in first["reports"]] == ["b", "a"]
    assert set(first["reports"][0]) == {
        "request", "prompt_tokens", "tokens", "strip", "sources", "n_sources", "reason", "ended_at",
    }  # fmt: skip
    assert first["stats"]["counters"]["requests_reported"] == 2
    assert [fate["name"] for fate in first["fates"]] == list(Fate)
    assert first["whys"] == SENTENCES and set(SENTENCES) == set(Why)


@pytest.mark.parametrize("path, kind", [("/", "text/html"), ("/page.css", "text/css"), ("/page.js", "text/javascript")])
def test_the_page_is_served_with_guards(hub, path, kind):
    (answer,) = answers(hub, path)
    assert answer.status_code == 200 and answer.headers["content-type"].startswith(kind) and answer.text
    assert "default-src 'none'; script-src 'self'" in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff" and answer.headers["cache-control"] == "no-store"
    assert "http://" not in answer.text.replace("http://www.w3.org/2000/svg", "") and "https://" not in answer.text


def test_the_page_changes_nothing_and_serves_no_other_file(hub):
    asked = ("/page/../pages.py", "/%2e%2e/pages.py", "/pages.py")
    assert {answer.status_code for answer in answers(hub, *asked)} == {404}
    assert [answer.status_code for answer in answers(hub, "/", "/metrics", method="POST")] == [405, 405]


@pytest.mark.parametrize("name", ["evil.example:9464", "127.0.0.1.evil.example"])
def test_a_strangers_name_for_this_machine_is_refused_but_not_to_monitoring(hub, name):
    asked = ("/", "/page.json", "/page.js", "/metrics", "/healthz")
    refused = [answer.status_code for answer in answers(hub, *asked, host=name)]
    assert refused == [403, 403, 403, 200, 200]
    (answer,) = answers(hub, "/kv?salt=s", host=name, method="DELETE")
    assert answer.status_code == 403


@pytest.mark.parametrize("sent", [b"", b"x", b"GET /metrics HTTP/1.1\r\nx: " + 200_000 * b"y"])
def test_metrics_are_served_beside_many_connections_that_ask_for_nothing(hub, sent):
    async def serve():
        async with http_server("127.0.0.1:0", pages(hub.service)) as address:
            host, _, port = address.rpartition(":")
            held = [await asyncio.open_connection(host, int(port)) for _ in range(100)]
            for _, writer in held:
                writer.write(sent)
            async with httpx.AsyncClient(trust_env=False) as client:
                answer = await client.get(f"http://{address}/metrics", timeout=5)
            assert answer.status_code == 200 and "blendhub_chunks" in answer.text
            for _, writer in held:
                writer.close()

    hub.run(serve())


def test_an_address_that_cannot_be_had_is_an_error_with_the_key(hub):
    async def serve(address):
        async with http_server(address, pages(hub.service)):
            raise AssertionError("it serves")

    with pytest.raises(OptionError, match="metrics = '9464' should be HOST:PORT"):
        hub.run(serve("9464"))
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(HubError, match="set metrics to another"):
        hub.run(serve(f"127.0.0.1:{taken.getsockname()[1]}"))


# Deletion.


@pytest.mark.parametrize("at", ["127.0.0.1:0", "[::1]:0"])
def test_the_owner_deletes_a_salt_and_may_ask_again(hub, at):
    hub.join().store(tokens(1, 3 * CHUNK), variant=SALT)
    asked = answers(hub, "/kv?salt=s", "/kv?salt=s", method="DELETE", at=at)
    assert [answer.status_code for answer in asked] == [200, 200]
    assert hub.service.stats().gauges["chunks"] == 0
    hub.state.check_integrity()


def test_what_is_wrong_is_said(hub):
    wrong = ("/kv", "/kv?salt=", "/kv?salt=a&salt=b", "/kv?salt=a&request=b", f"/kv?salt={'x' * 3000}")
    refused = answers(hub, *wrong, method="DELETE")
    assert {answer.status_code for answer in refused} == {400} and "name one cache salt" in refused[0].text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user; run the tests as root")
def test_a_process_of_another_user_deletes_nothing(hub):
    hub.join().store(tokens(1, CHUNK), variant=SALT)

    async def ask():
        async with http_server("127.0.0.1:0", pages(hub.service)) as address:
            host, _, port = address.rpartition(":")
            process = run_python(DELETE, host, port, str(ANOTHER_USER))
            return (await asyncio.to_thread(process.communicate))[0]

    assert "403 Forbidden" in hub.run(ask())
    assert hub.service.stats().gauges["chunks"] == 1
