"""The pages of the metrics port: numbers for Prometheus, and a page for people with each engine's last requests."""

import ipaddress
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

import msgspec

from blendhub.client.wire import HubStats
from blendhub.hub.counters import Counters
from blendhub.hub.http.server import TEXT, Page
from blendhub.hub.http.stats import exposition
from blendhub.hub.reports import ReportTable
from blendhub.outcome.fates import COLOURS, WHY, Fate
from blendhub.outcome.reasons import SENTENCES

JSON = "application/json"
FILES = Path(__file__).parent / "page"
STATIC: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "/": ("index.html", "text/html; charset=utf-8"),
        "/page.css": ("page.css", "text/css; charset=utf-8"),
        "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    }
)


PAGE_LASTS_S = 0.25
"""How long the numbers and reports of the page are answered as they are: it may take MBs, and anybody may ask."""


class _Cached(NamedTuple):
    until: float
    body: bytes


class Routes:
    """Makes the pages of the metrics port, on the hub's event loop."""

    def __init__(
        self,
        stats: Callable[[], HubStats],
        counters: Counters,
        reports: ReportTable,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._made: dict[str, _Cached] = {}
        """The pages that were made, by engine."""
        self._stats = stats
        self._counters = counters
        self._reports = reports

    async def get(self, target: str, host: str) -> Page:
        """The answer for a path with its query, and the Host that the client asked for."""
        path, query = urlsplit(target).path, urlsplit(target).query
        if path == "/metrics":
            return Page("200 OK", TEXT, exposition(self._stats(), self._counters))
        if path == "/healthz":
            return Page("200 OK", TEXT, b"ok\n")
        if path not in (*STATIC, "/page.json"):
            return Page("404 Not Found", TEXT, b"this server has /, /metrics and /healthz\n")
        if not is_address(host):
            # A stranger's page could make its own name mean this machine, and read what this one shows.
            return Page("403 Forbidden", TEXT, b"open this page by an IP address, or as localhost\n")
        if path in STATIC:
            name, kind = STATIC[path]
            return Page("200 OK", kind, (FILES / name).read_bytes())
        (asked,) = parse_qs(query).get("engine", [""])[:1]
        return self._page_json(asked)

    def _page_json(self, asked: str) -> Page:
        engines = self._reports.engines()
        engine = asked if asked in engines else self._reports.latest_engine
        now = self._clock()
        self._made = {name: made for name, made in self._made.items() if now < made.until}
        if engine not in self._made:
            page = {"stats": self._stats(), "engines": engines, "engine": engine}
            self._made[engine] = _Cached(now + PAGE_LASTS_S, _encoded(page, self._reports.encoded(engine)))
        return Page("200 OK", JSON, self._made[engine].body)


def _encoded(page: dict[str, Any], kept: list[bytes]) -> bytes:
    reports = [msgspec.Raw(one) for one in kept]
    fates = [{"name": fate, "label": fate.label, "colour": COLOURS[fate], "why": WHY[fate]} for fate in Fate]
    return msgspec.json.encode({**page, "reports": reports, "fates": fates, "whys": SENTENCES})


def is_address(host: str) -> bool:
    """Whether the host of a URL is an address, which no name server can give another meaning, or ``localhost``."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() and not host.endswith("]") else host
    if name == "localhost":
        return True
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True
