"""What engines report of their prompts: kept within bounds, found by id, and never a token of the text."""

import asyncio
import json
import statistics
import subprocess
import sys
import time
from typing import Any

import msgspec
import numpy as np
import pytest

from blendhub.client import wire
from blendhub.core.errors import InvalidInput, ProtocolError
from blendhub.core.layout import Namespace, Variant
from blendhub.core.spans import Match, Span
from blendhub.hub.config import HubConfig
from blendhub.hub.embedded import HubInProcess
from blendhub.hub.http.routes import Routes, is_address
from blendhub.hub.http.server import MetricsServer
from blendhub.hub.limits import MOST_KEPT_REPORTS, MOST_REPORTING_ENGINES
from blendhub.hub.reports import ReportTable
from blendhub.outcome.fates import Fate, Stretch
from blendhub.outcome.reasons import SENTENCES, NotReused, Why
from blendhub.outcome.report import (
    MOST_NOT_REUSED,
    MOST_REPORTS,
    MOST_SOURCES,
    MOST_STRETCHES,
)
from tests.hub.hub_direct import CHUNK, LAYOUT, DirectHub, tokens
from tests.prompt_notes import prompt_report

EIGHT_READERS = """
import sys, threading, urllib.request

def read_on():
    while True:
        try:
            urllib.request.urlopen(sys.argv[1], timeout=10).read()
        except OSError:
            pass

for _ in range(8):
    threading.Thread(target=read_on).start()
"""
SPANS = {"exact": [Span(16, 32)], "moved": [Span(40, 90)], "recomputed": [Span(50, 60)], "holes": [Span(32, 40)]}
SOURCES = [Match(Span(16, 32), 7, 16, True), Match(Span(40, 90), 9, 0, False)]


def report(request: str = "cmpl-1", n_tokens: int = 100, **more):
    return prompt_report(request, n_tokens, 16, SPANS, SOURCES, **more)


def test_a_report_paints_the_whole_prompt():
    assert [(one.span.start, one.span.end, one.fate) for one in report().strip] == [
        (0, 16, Fate.CACHED),
        (16, 32, Fate.EXACT),
        (32, 40, Fate.HOLE),
        (40, 50, Fate.MOVED),
        (50, 60, Fate.RECOMPUTED),
        (60, 90, Fate.MOVED),
        (90, 100, Fate.COMPUTED),
    ]
    assert report().tokens == {"cached": 16, "exact": 16, "moved": 40, "recomputed": 10, "hole": 8, "computed": 10}


@pytest.mark.slow
def test_a_report_of_any_prompt_is_within_the_bounds_of_a_message():
    some = np.arange(0, 10**6, 2)
    spans = {"moved": [Span(0, 10**6)], "recomputed": [Span(at, at + 1) for at in some.tolist()]}
    sources = [Match(Span(at, at + 1), 1, at, False) for at in range(1000)]
    long = prompt_report("x" * 1000, 10**6, 0, spans, sources, "y" * 10**6)
    assert len(long.strip) <= MOST_STRETCHES and len(long.sources) == MOST_SOURCES and long.n_sources == 1000
    assert long.strip[0].span.start == 0 and long.strip[-1].span.end == 10**6
    assert long.tokens == {"moved": 500_000, "recomputed": 500_000}
    sent = msgspec.msgpack.encode(long)
    assert len(sent) < 2**14 and msgspec.msgpack.decode(sent, type=type(long)) == long


def test_a_report_says_why_each_stretch_was_computed_and_nothing_of_what_was_reused():
    whys = {Why.NOTHING_STORED: [Span(0, 100)], Why.TOO_MUCH: [Span(30, 95)], Why.LAST: [Span(99, 100)]}
    computed = report(whys=whys)
    assert [(one.span.start, one.span.end, one.why) for one in computed.not_reused] == [
        (32, 40, Why.TOO_MUCH), (90, 95, Why.TOO_MUCH), (95, 99, Why.NOTHING_STORED), (99, 100, Why.LAST),
    ]  # fmt: skip
    assert computed.n_not_reused == 4
    assert report().not_reused == () and report().n_not_reused == 0  # not known


def test_a_reported_request_is_found_by_the_id_of_its_response(hub: DirectHub):
    member = hub.join("an-engine")
    member.ask(wire.Reported, reports=(report("cmpl-12-0-abcdefgh", n_tokens=100), report("cmpl-1-0-abcdefgh")))
    found = hub.ask(wire.Explain("cmpl-1"))
    assert found.engine == "an-engine" and found.report.request == "cmpl-1-0-abcdefgh"
    assert found.report.sources == tuple(SOURCES) and found.report.ended_at > 1.6e9
    assert hub.ask(wire.Explain("cmpl-12-0-abcdefgh")).report.request == "cmpl-12-0-abcdefgh"
    assert hub.ask(wire.Explain("cmpl")).report is not None  # what stands before a dash
    assert hub.ask(wire.Explain("cmpl-2")) == wire.Explained()


def test_the_newest_reports_of_some_engines_are_kept():
    table = ReportTable(lambda: 5.0)
    for number in range(MOST_KEPT_REPORTS + 10):
        table.add("busy", [report(f"r{number}")])
    assert len(table.encoded("busy")) == MOST_KEPT_REPORTS
    assert table.find("r9") is None and table.find("r10") and table.find(f"r{MOST_KEPT_REPORTS + 9}")
    for number in range(MOST_REPORTING_ENGINES):
        table.add(f"e{number}", [report()])
    assert len(table.engines()) == MOST_REPORTING_ENGINES and "busy" not in table.engines()
    assert table.latest_engine == f"e{MOST_REPORTING_ENGINES - 1}" and table.encoded("unknown") == []


def test_a_message_of_reports_is_bounded(hub: DirectHub):
    member = hub.join()
    many = tuple(Stretch(Span(at, at + 1), Fate.MOVED) for at in range(MOST_STRETCHES + 1))
    secret: Any = "secret"
    for wrong in (
        (report(),) * (MOST_REPORTS + 1),
        (msgspec.structs.replace(report(), strip=many),),
        (msgspec.structs.replace(report(), sources=tuple(SOURCES) * MOST_SOURCES),),
        (msgspec.structs.replace(report(), request="x" * 1000),),
        (msgspec.structs.replace(report(), reason="x" * 10**4),),
        (msgspec.structs.replace(report(), tokens={"secret": 1}),),
        (msgspec.structs.replace(report(), not_reused=(NotReused(Span(0, 1), Why.LAST),) * (MOST_NOT_REUSED + 1)),),
        (msgspec.structs.replace(report(), not_reused=(NotReused(Span(0, 1), secret),)),),
    ):
        with pytest.raises(ProtocolError):
            member.ask(wire.Reported, reports=wrong)
    assert hub.service.reports.engines() == []


def test_a_preview_says_what_would_be_found_and_changes_nothing(hub: DirectHub):
    member = hub.join("an-engine")
    text, other = tokens(1, 2 * CHUNK), tokens(2, CHUNK)
    member.store(text)
    member.store(text, variant=Variant(cache_salt="salt"))
    before = hub.service.stats().counters
    prompt = np.concatenate([other, text])
    found = hub.ask(wire.Preview(), [prompt.tobytes()])
    assert (found.engine, found.model) == ("an-engine", "m")
    assert found.matches == member.lookup(prompt, acquire=False).matches
    assert hub.ask(wire.Preview(engine="an-engine"), [text.tobytes()]).matches[0].exact
    assert hub.ask(wire.Preview(variant=Variant(cache_salt="else")), [text.tobytes()]).matches == ()
    assert hub.ask(wire.Preview(), [b""]).matches == ()
    after = hub.service.stats().counters
    counted = ("tokens_exact", "tokens_moved", "lookups_that_found", "requests_lookup")
    assert after["tokens_moved"] == before["tokens_moved"] + 2 * CHUNK  # of the one lookup
    assert [after[name] - before.get(name, 0) for name in counted[2:]] == [1, 1]
    assert not hub.state.reads.leases and hub.service.stats().gauges["read_leases"] == 0


def test_a_preview_names_the_engines_that_there_are(hub: DirectHub):
    with pytest.raises(InvalidInput, match="none: start vLLM with this hub"):
        hub.ask(wire.Preview(), [b""])
    hub.join("one"), hub.join("two")
    with pytest.raises(InvalidInput, match="name one of the engines that are registered: one, two"):
        hub.ask(wire.Preview(), [b""])
    with pytest.raises(InvalidInput, match="no engine 'three' is registered; name one of: one, two"):
        hub.ask(wire.Preview(engine="three"), [b""])
    assert hub.ask(wire.Preview(engine="two"), [b""]).engine == "two"


def test_long_prompts_are_previewed_in_a_thread(make_hub):
    hub = make_hub(inline=CHUNK)
    hub.join().store(tokens(1, 2 * CHUNK))
    assert hub.ask(wire.Preview(), [tokens(1, 2 * CHUNK).tobytes()]).matches


# The page and its JSON.


def answers(hub: DirectHub, *requests: str) -> list[tuple[str, str]]:
    """Heads and bodies of what the metrics port answers."""

    async def ask() -> list[tuple[str, str]]:
        service = hub.service
        routes = Routes(service.stats, service.counters, service.reports, service.forget)
        server = MetricsServer(routes.get, routes.delete)
        host, _, port = (await server.start("127.0.0.1:0")).rpartition(":")
        got = []
        for request in requests:
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(request.encode())
            head, _, body = (await asyncio.wait_for(reader.read(), 5)).decode().partition("\r\n\r\n")
            got.append((head, body))
            writer.close()
        await server.close()
        return got

    return hub.run(ask())


def of(path: str, host: str = "127.0.0.1:9464", method: str = "GET") -> str:
    return f"{method} {path} HTTP/1.1\r\nHost: {host}\r\n\r\n"


def test_the_page_s_json_has_reports_and_numbers_and_nothing_of_the_text(hub: DirectHub):
    hub.join("first").ask(wire.Reported, reports=(report("a"), report("b", reason="why")))
    hub.join("second").ask(wire.Reported, reports=(report("c"),))
    latest, first, unknown = (
        json.loads(body)
        for _, body in answers(hub, of("/page.json"), of("/page.json?engine=first"), of("/page.json?engine=x"))
    )
    assert latest["engines"] == ["first", "second"] and latest["engine"] == unknown["engine"] == "second"
    assert [one["request"] for one in first["reports"]] == ["b", "a"]
    assert set(first["reports"][0]) == {
        "request", "prompt_tokens", "tokens", "strip", "sources", "n_sources", "reason", "ended_at",
    }  # fmt: skip
    assert first["stats"]["counters"]["requests_reported"] == 2
    assert [fate["name"] for fate in first["fates"]] == list(Fate)
    assert first["whys"] == SENTENCES and set(SENTENCES) == set(Why)


@pytest.mark.parametrize("path, kind", [("/", "text/html"), ("/page.css", "text/css"), ("/page.js", "text/javascript")])
def test_the_page_is_served_with_guards(hub: DirectHub, path, kind):
    ((head, body),) = answers(hub, of(path))
    assert head.startswith("HTTP/1.1 200 OK") and f"Content-Type: {kind}" in head and body
    assert "default-src 'none'; script-src 'self'" in head and "nosniff" in head and "no-store" in head
    assert "http://" not in body.replace("http://www.w3.org/2000/svg", "") and "https://" not in body


def test_the_page_changes_nothing_and_serves_no_other_file(hub: DirectHub):
    asked = [of("/", method="POST"), of("/page/../pages.py"), of("/../hub/pages.py"), of("/page.py"), of("//x/page.js")]
    statuses = [head.split()[1] for head, _ in answers(hub, *asked)]
    assert statuses == ["405", "404", "404", "404", "200"]


def test_a_strangers_name_for_this_machine_is_refused_but_not_to_monitoring(hub: DirectHub):
    asked = [of(path, "evil.example:9464") for path in ("/", "/page.json", "/page.js", "/metrics", "/healthz")]
    statuses = [head.split()[1] for head, _ in answers(hub, *asked)]
    assert statuses == ["403", "403", "403", "200", "200"]


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.0.0.1:1", "localhost:9464", "localhost", "[::1]:80", "[::1]", "10.0.0.3"]
)
def test_addresses_are_told_from_names(host):
    assert is_address(host)
    assert not is_address(f"{host.strip('[]')}.evil.example") and not is_address("")


@pytest.mark.alone
def test_readers_of_the_page_s_json_hardly_delay_a_client():
    """Eight threads that ask without a pause, for a page of 2.9 MB, raised the median from 0.1 to 35 ms."""
    with HubInProcess(HubConfig(arena_gib=0.01)) as hub, hub.connect() as client:
        client.register("e", Namespace(model="m", layout=LAYOUT), rank=0)
        spans = {"moved": [Span(at * 20, at * 20 + 10) for at in range(250)]}
        sources = [Match(Span(at * 20, at * 20 + 10), 2**52, at, False) for at in range(64)]
        for _ in range(MOST_KEPT_REPORTS):
            client.report_prompts([prompt_report("r", 5000, 0, spans, sources)])
        page = f"http://{hub.metrics_address}/page.json"
        with subprocess.Popen([sys.executable, "-c", EIGHT_READERS, page]) as readers:
            time.sleep(1.0)
            waits = []
            for _ in range(200):
                begun = time.perf_counter()
                client.lookup(tokens(1, 4096))
                waits.append(time.perf_counter() - begun)
            readers.kill()
    assert statistics.median(waits) < 0.005
