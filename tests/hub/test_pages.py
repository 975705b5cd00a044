"""What the hub shows: reports within bounds, previews, `/metrics` and the page."""

import re
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from blendhub.client import wire
from blendhub.core.errors import InvalidInput, ProtocolError
from blendhub.core.layout import Variant
from blendhub.core.spans import Match, Span
from blendhub.hub.counters import RECENT, Audits
from blendhub.hub.http.pages import pages
from blendhub.hub.http.server import http_server
from blendhub.hub.limits import MAX_KEPT_REPORTS, MAX_REPORTING_ENGINES
from blendhub.hub.reports import ReportTable
from blendhub.outcome.agreement import wilson
from blendhub.outcome.fates import Fate, count
from blendhub.outcome.reasons import NotReused, Why
from blendhub.outcome.report import MAX_OUTCOMES, MAX_SPANS, ReusedSpans
from tests.hub.hub_direct import CHUNK, DirectHub, tokens
from tests.metric_names import OF_HUB
from tests.outcomes import audited, outcome
from tests.prometheus import needs_prometheus, promtool

SALT = Variant(cache_salt="s")
SPANS = {"exact": [Span(16, 32)], "moved": [Span(40, 90)], "recomputed": [Span(50, 60)], "holes": [Span(32, 40)]}
SOURCES = [Match(Span(16, 32), 7, 16, True), Match(Span(40, 90), 9, 0, False)]


def report(request: str = "cmpl-1", **more: Any):
    return outcome(request, 100, 16, SPANS, SOURCES, **more)


def answers(hub: DirectHub, *targets: str, method: str = "GET", host: str = "127.0.0.1:9464") -> list[httpx.Response]:
    async def ask() -> list[httpx.Response]:
        async with (
            http_server("127.0.0.1:0", pages(hub.service)) as address,
            httpx.AsyncClient(base_url=f"http://{address}", headers={"Host": host}, trust_env=False) as client,
        ):
            return [await client.request(method, target) for target in targets]

    return hub.run(ask())


# Reports and previews.


def test_what_an_engine_sends_of_any_prompt_is_within_the_bounds_of_a_message_and_the_hub_takes_no_more(hub):
    spans = {"moved": [Span(0, 10**6)], "recomputed": [Span(at, at + 1) for at in range(0, 10**6, 2)]}
    sources = [Match(Span(at, at + 1), 1, at, False) for at in range(2 * MAX_SPANS)]
    long = outcome("x" * 1000, 10**6, 0, spans, sources, "y" * 10**6).bounded()
    n_tokens = count(long.strip())
    assert n_tokens[Fate.MOVED] == n_tokens[Fate.RECOMPUTED] == 500_000
    sent = msgspec.msgpack.encode(long)
    assert len(sent) < 2**16 and msgspec.msgpack.decode(sent, type=type(long)) == long
    member, many = hub.join(), MAX_SPANS + 1
    for wrong in (
        {"spans": ReusedSpans(recomputed=(Span(0, 1),) * many)},
        {"sources": (SOURCES[0],) * many},
        {"unused": (NotReused(Span(0, 1), Why.LAST),) * many},
        {"request": "x" * 1000},
        {"reason": "x" * 10**4},
    ):
        with pytest.raises(ProtocolError):
            member.ask(wire.Reported, outcomes=(msgspec.structs.replace(report(), **wrong),))
    with pytest.raises(ProtocolError):
        member.ask(wire.Reported, outcomes=(report(),) * (MAX_OUTCOMES + 1))
    assert hub.service.reports.engines() == []


def test_the_newest_reports_of_some_engines_are_kept_and_found_by_the_ids_of_responses(hub):
    member = hub.join("an-engine")
    member.ask(wire.Reported, outcomes=(report("cmpl-12-0-abcdefgh"), report("cmpl-1-0-abcdefgh")))
    found = hub.ask(wire.Explain("cmpl-1"))
    assert found.engine == "an-engine" and found.outcome == report("cmpl-1-0-abcdefgh")
    assert hub.ask(wire.Explain("cmpl-2")) == wire.Explained()
    table = ReportTable()
    for number in range(MAX_KEPT_REPORTS + 10):
        table.add("busy", [report(f"r{number}")])
    assert len(table.encoded("busy")) == MAX_KEPT_REPORTS
    assert table.find("r9") is None and table.find("r10") and table.find(f"r{MAX_KEPT_REPORTS + 9}")
    for number in range(MAX_REPORTING_ENGINES):
        table.add(f"e{number}", [report()])
    assert len(table.engines()) == MAX_REPORTING_ENGINES and "busy" not in table.engines()
    assert table.latest_engine == f"e{MAX_REPORTING_ENGINES - 1}"


def test_a_preview_says_what_would_be_found_and_changes_nothing(hub):
    member, text = hub.join("an-engine"), tokens(1, 2 * CHUNK)
    member.store(text)
    before = hub.service.counters.totals.copy()
    prompt = np.concatenate([tokens(2, CHUNK), text])
    found = hub.ask(wire.Preview(), [prompt.tobytes()])
    assert hub.ask(wire.Preview(variant=SALT), [text.tobytes()]).matches == ()
    assert hub.service.counters.totals == before and not hub.state.reads.leases
    assert found.matches == member.lookup(prompt, acquire=False).matches
    hub.join("another")
    with pytest.raises(InvalidInput, match="name one of the engines that are registered: an-engine, another"):
        hub.ask(wire.Preview(), [b""])


# Numbers.


def test_all_audits_are_counted_and_the_last_ones_by_themselves():
    audits = Audits()
    for agrees in [False] * 9 + [True] * RECENT:
        audits.add(agrees=agrees)
    assert list(audits.numbers().values()) == [RECENT + 9, 9, RECENT, 0]


@needs_prometheus
def test_every_metric_has_a_meaning_and_follows_the_conventions_of_prometheus(make_hub, tmp_path):
    hub = make_hub(2, tmp_path)
    member = hub.join()
    for seed in range(3):
        member.store(tokens(seed, CHUNK))
        hub.settle()
    member.lookup(tokens(0, CHUNK), wait_s=5.0)
    member.ask(wire.Reported, outcomes=audited(True, True, True, False))
    member.ask(wire.Reported, outcomes=audited(False, is_sample=False))  # which the engine did not choose
    with pytest.raises(InvalidInput):
        member.ask(wire.Lookup, [b"", b""])
    (answer,) = answers(hub, "/metrics")
    checked = promtool("check", "metrics", given=answer.text)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")
    shown = dict(re.findall(r"^# HELP blendhub_(\w+) (.*)$", answer.text, re.M))
    assert shown == {name: about for name, about in OF_HUB.items() if not name.startswith("fleet_")}
    values = {name: float(value) for name, value in re.findall(r"^blendhub_(\S+) (\S+)$", answer.text, re.M)}
    assert values['request_seconds_bucket{kind="lookup",le="+Inf"}'] == 1
    assert values['store_read_seconds_bucket{le="+Inf"}'] == 1 == values["store_loads_total"]
    assert 0 < values["store_read_seconds_sum"] < 10
    assert values['refused_requests_total{error="InvalidInput"}'] == 1
    (digest,) = hub.service.stats().namespaces
    ends = [values[f'namespace_agreement_{end}ratio{{namespace="{digest}"}}'] for end in ("", "low_", "high_")]
    assert ends == [0.75, *wilson(3, 4)]


# Over HTTP.


def test_the_page_is_served_with_guards_to_this_machine_alone_and_nothing_else_is(hub):
    files = {"/": "text/html", "/page.css": "text/css", "/page.js": "text/javascript"}
    for answer, kind in zip(answers(hub, *files), files.values(), strict=True):
        assert answer.status_code == 200 and answer.headers["content-type"].startswith(kind) and answer.text
        assert "default-src 'none'; script-src 'self'" in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff" and answer.headers["cache-control"] == "no-store"
        assert "http://" not in answer.text.replace("http://www.w3.org/2000/svg", "") and "https://" not in answer.text
    others = ("/page/../pages.py", "/%2e%2e/pages.py", "/pages.py")
    assert {answer.status_code for answer in answers(hub, *others)} == {404}
    for method in ("POST", "DELETE"):
        assert [answer.status_code for answer in answers(hub, "/", "/metrics", "/kv?salt=s", method=method)] == [
            405
        ] * 3
    # A stranger's page could make its own name mean this machine.
    for name in ("evil.example:9464", "127.0.0.1.evil.example"):
        asked = answers(hub, "/", "/page.json", "/page.js", "/metrics", "/healthz", host=name)
        assert [answer.status_code for answer in asked] == [403, 403, 403, 200, 200]
