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
DELETE_AS_ANOTHER_USER = """
import encodings.idna, os, socket, sys  # another user may not be able to import
os.setgid(65534), os.setuid(65534)
with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=10) as connection:
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
    hub.join("first").ask(wire.Reported, outcomes=(report("a"), report("b", reason="why")))
    hub.join("second").ask(wire.Reported, outcomes=(report("c"),))
    asked = answers(hub, "/page.json", "/page.json?engine=first", "/page.json?engine=x")
    latest, first, unknown = (answer.json() for answer in asked)
    assert latest["engines"] == ["first", "second"] and latest["engine"] == unknown["engine"] == "second"
    assert [shown["request"] for shown in first["reports"]] == ["b", "a"]
    assert set(first["reports"][0]) == {
        "request", "prompt_tokens", "tokens", "strip", "sources", "n_sources", "not_reused", "n_not_reused",
        "reason", "ended_at",
    }  # fmt: skip
    assert first["stats"]["counters"]["requests_reported"] == 2
    assert [fate["name"] for fate in first["fates"]] == list(Fate)
    assert first["whys"] == SENTENCES and set(SENTENCES) == set(Why)


def test_the_page_is_served_with_guards_and_nothing_else_is(hub):
    files = {"/": "text/html", "/page.css": "text/css", "/page.js": "text/javascript"}
    for answer, kind in zip(answers(hub, *files), files.values(), strict=True):
        assert answer.status_code == 200 and answer.headers["content-type"].startswith(kind) and answer.text
        assert "default-src 'none'; script-src 'self'" in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff" and answer.headers["cache-control"] == "no-store"
        assert "http://" not in answer.text.replace("http://www.w3.org/2000/svg", "") and "https://" not in answer.text
    others = ("/page/../pages.py", "/%2e%2e/pages.py", "/pages.py")
    assert {answer.status_code for answer in answers(hub, *others)} == {404}
    assert [answer.status_code for answer in answers(hub, "/", "/metrics", method="POST")] == [405, 405]


@pytest.mark.parametrize("name", ["evil.example:9464", "127.0.0.1.evil.example"])
def test_a_strangers_name_for_this_machine_is_refused_but_not_to_monitoring(hub, name):
    asked = ("/", "/page.json", "/page.js", "/metrics", "/healthz")
    refused = [answer.status_code for answer in answers(hub, *asked, host=name)]
    assert refused == [403, 403, 403, 200, 200]
    (answer,) = answers(hub, "/kv?salt=s", host=name, method="DELETE")
    assert answer.status_code == 403


def test_an_address_that_cannot_be_had_is_an_error_with_the_key(hub):
    async def serve(address):
        async with http_server(address, pages(hub.service)):
            raise AssertionError("it serves")

    with pytest.raises(OptionError, match="metrics = '9464' should be HOST:PORT"):
        hub.run(serve("9464"))
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(HubError, match="set metrics to another"):
        hub.run(serve(f"127.0.0.1:{taken.getsockname()[1]}"))


@pytest.mark.parametrize("at", ["127.0.0.1:0", "[::1]:0"])
def test_the_owner_deletes_a_salt_and_may_ask_again(hub, at):
    hub.join().store(tokens(1, 3 * CHUNK), variant=SALT)
    asked = answers(hub, "/kv?salt=s", "/kv?salt=s", method="DELETE", at=at)
    assert [answer.status_code for answer in asked] == [200, 200]
    assert hub.service.stats().gauges["chunks"] == 0
    wrong = ("/kv", "/kv?salt=", "/kv?salt=a&salt=b", "/kv?salt=a&request=b", f"/kv?salt={'x' * 3000}")
    refused = answers(hub, *wrong, method="DELETE", at=at)
    assert {answer.status_code for answer in refused} == {400} and "name one cache salt" in refused[0].text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user; run the tests as root")
def test_a_process_of_another_user_deletes_nothing(hub):
    hub.join().store(tokens(1, CHUNK), variant=SALT)

    async def ask():
        async with http_server("127.0.0.1:0", pages(hub.service)) as address:
            process = run_python(DELETE_AS_ANOTHER_USER, *address.rsplit(":", 1))
            return (await asyncio.to_thread(process.communicate))[0]

    assert "403 Forbidden" in hub.run(ask())
    assert hub.service.stats().gauges["chunks"] == 1
