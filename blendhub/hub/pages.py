"""What the metrics port shows: numbers for Prometheus, and a page for people with the last requests of each engine."""

import asyncio
import ipaddress
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from urllib.parse import parse_qs, urlsplit

import msgspec

from blendhub.fates import COLOURS, WHY, Fate
from blendhub.hub.metrics import TEXT, Page, exposition
from blendhub.hub.reports import ReportTable
from blendhub.why_unused import SENTENCES
from blendhub.wire import HubStats

FILES = Path(__file__).parent / "page"
STATIC: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "/": ("index.html", "text/html; charset=utf-8"),
        "/page.css": ("page.css", "text/css; charset=utf-8"),
        "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    }
)


class Pages:
    """Runs on the hub's event loop; what takes longer runs in a thread."""

    def __init__(self, stats: Callable[[], HubStats], reports: ReportTable) -> None:
        self._stats = stats
        self._reports = reports

    async def get(self, target: str, host: str) -> Page:
        """The answer for a path with its query, and the Host that the client asked for."""
        path, query = urlsplit(target).path, urlsplit(target).query
        if path == "/metrics":
            return Page("200 OK", TEXT, exposition(self._stats()).encode())
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
        engines = self._reports.engines()
        asked = parse_qs(query).get("engine", [""])[0]
        engine = asked if asked in engines else self._reports.latest_engine
        kept, stats = self._reports.encoded(engine), self._stats()
        return Page("200 OK", "application/json", await asyncio.to_thread(_page_json, stats, engines, engine, kept))


def _page_json(stats: HubStats, engines: list[str], engine: str, kept: list[bytes]) -> bytes:
    reports = [msgspec.msgpack.decode(one) for one in kept]
    fates = [{"name": fate, "label": fate.label, "colour": COLOURS[fate], "why": WHY[fate]} for fate in Fate]
    page = {"stats": stats, "engines": engines, "engine": engine, "reports": reports, "fates": fates, "whys": SENTENCES}
    return msgspec.json.encode(page)


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
