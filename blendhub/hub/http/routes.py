"""The pages of the metrics port: numbers for Prometheus, a page for people with each engine's last requests, and the
deletion of KV.
"""

import ipaddress
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

import msgspec

from blendhub.client.wire import Forget, HubStats
from blendhub.core.errors import BlendHubError, Busy, InvalidInput
from blendhub.hub.counters import Counters
from blendhub.hub.http.metrics import exposition
from blendhub.hub.http.server import TEXT, Page
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
        forget: Callable[[Forget], Awaitable[Any]],
    ) -> None:
        self._made: dict[str, _Cached] = {}
        """The pages that were made, by engine."""
        self._stats = stats
        self._counters = counters
        self._reports = reports
        self._forget = forget

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

    async def delete(self, target: str, host: str) -> Page:
        """The receipt of a deletion, as JSON; or why it was not done."""
        asked = parse_qs(urlsplit(target).query)
        if urlsplit(target).path != "/kv" or not is_address(host):
            return Page("404 Not Found", TEXT, b"DELETE /kv?request=ID or /kv?salt=S, at an IP address or localhost\n")
        try:
            request, salt = (_only(asked, name) for name in ("request", "salt"))
            gone = await self._forget(msgspec.convert({"is": "Forget", "request": request, "salt": salt}, Forget))
        except (InvalidInput, msgspec.ValidationError) as error:
            return Page("400 Bad Request", TEXT, f"{error}\n".encode())
        except Busy as error:
            return Page("429 Too Many Requests", TEXT, f"{error}\n".encode())
        except BlendHubError as error:
            return Page("503 Service Unavailable", TEXT, f"not all of it is deleted, ask again: {error}\n".encode())
        return Page("200 OK", JSON, msgspec.json.encode({"tokens": gone.tokens, "chunks": gone.chunks}))

    def _page_json(self, asked: str) -> Page:
        engines = self._reports.engines()
        engine = asked if asked in engines else self._reports.latest_engine
        now = time.monotonic()
        self._made = {name: made for name, made in self._made.items() if now < made.until}
        if engine not in self._made:
            page = {"stats": self._stats(), "engines": engines, "engine": engine}
            self._made[engine] = _Cached(now + PAGE_LASTS_S, _encoded(page, self._reports.encoded(engine)))
        return Page("200 OK", JSON, self._made[engine].body)


def _only(asked: Mapping[str, Sequence[str]], name: str) -> str:
    values = asked.get(name, [""])
    if len(values) > 1:
        raise InvalidInput(f"{name} is given {len(values)} times; delete one after the other")
    return values[0]


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
