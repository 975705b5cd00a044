"""The pages of the metrics port: numbers for Prometheus, a page for people with each engine's last requests, and the
deletion of KV.
"""

import asyncio
import functools
import ipaddress
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from blendhub.client.wire import Forget
from blendhub.core.errors import BlendHubError, Busy, InvalidInput
from blendhub.hub.http.metrics import exposition
from blendhub.hub.http.owner import is_own
from blendhub.hub.limits import MAX_KEPT_REPORTS
from blendhub.hub.service import HubService
from blendhub.outcome.fates import COLOURS, WHY, Fate, count, shortened
from blendhub.outcome.reasons import MESSAGES, longest, not_reused
from blendhub.outcome.report import Outcome

FILES = Path(__file__).parent / "page"
EXPOSITION = "text/plain; version=0.0.4"
JSON = "application/json"
MAX_STRETCHES = 512
"""The most stretches of a strip; a longer strip is shortened to equal parts."""
MAX_ROWS = 64
"""The most rows of a table."""
FOR_MONITORING = ("/metrics", "/healthz")
# A page loads nothing from elsewhere, and runs no script but its own.
GUARDS: Mapping[str, str] = MappingProxyType(
    {
        "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-store",
    }
)


def pages(service: HubService) -> Starlette:
    """The application of the metrics port. Everyone may read; the user that the hub runs as may delete KV."""

    async def metrics(request: Request) -> Response:
        return Response(exposition(service.stats(), service.counters), media_type=EXPOSITION)

    async def healthz(request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def page_json(request: Request) -> Response:
        reports = service.reports
        engines, asked = reports.engines(), request.query_params.get("engine", "")
        engine = asked if asked in engines else reports.latest_engine
        page = {
            "stats": service.stats(),
            "engines": engines,
            "engine": engine,
            "reports": await asyncio.to_thread(lambda encoded: list(map(_as_shown, encoded)), reports.encoded(engine)),
            "fates": [{"name": fate, "label": fate.label, "colour": COLOURS[fate], "why": WHY[fate]} for fate in Fate],
            "messages": MESSAGES,
        }
        return Response(msgspec.json.encode(page), media_type=JSON)

    async def delete(request: Request) -> Response:
        if not (request.client and is_own(request.client, request.scope["server"])):
            return PlainTextResponse("only the hub's own user may delete here; see blendhub forget\n", 403)
        salts = request.query_params.getlist("salt")
        if len(salts) != 1 or len(request.query_params.multi_items()) != 1:
            return PlainTextResponse("name one cache salt: DELETE /kv?salt=S\n", 400)
        try:
            await service.forget(msgspec.convert({"is": "Forget", "salt": salts[0]}, Forget))
        except (InvalidInput, msgspec.ValidationError) as error:
            return PlainTextResponse(f"{error}\n", 400)
        except Busy as error:
            return PlainTextResponse(f"{error}\n", 429)
        except BlendHubError as error:
            return PlainTextResponse(f"not all of it is deleted, ask again: {error}\n", 503)
        return PlainTextResponse("deleted\n")

    return Starlette(
        routes=[
            Route("/metrics", metrics),
            Route("/healthz", healthz),
            Route("/page.json", page_json),
            Route("/kv", delete, methods=["DELETE"]),
            Mount("/", StaticFiles(directory=FILES, html=True)),
        ],
        middleware=[Middleware(BaseHTTPMiddleware, dispatch=_guard)],
    )


@functools.lru_cache(2 * MAX_KEPT_REPORTS)
def _as_shown(encoded: bytes) -> msgspec.Raw:
    """What the page shows of an outcome."""
    outcome = msgspec.json.decode(encoded, type=Outcome)
    strip = outcome.strip()
    computed = not_reused(strip, outcome.unused)
    shown = {
        "request": outcome.request,
        "prompt_tokens": outcome.prompt_tokens,
        "tokens": {fate: n_tokens for fate, n_tokens in count(strip).items() if n_tokens},
        "strip": shortened(strip, MAX_STRETCHES),
        "sources": outcome.sources[:MAX_ROWS],
        "n_sources": len(outcome.sources),
        "not_reused": longest(computed, MAX_ROWS),
        "n_not_reused": len(computed),
        "reason": outcome.reason,
        "ended_at": outcome.ended_at,
    }
    return msgspec.Raw(msgspec.json.encode(shown))


async def _guard(request: Request, answer: RequestResponseEndpoint) -> Response:
    # A stranger's page could make its own name mean this machine, and read what this one shows.
    if request.url.path not in FOR_MONITORING and not is_address(request.headers.get("host", "")):
        return PlainTextResponse("open this page by an IP address, or as localhost\n", 403)
    response = await answer(request)
    response.headers.update(GUARDS)
    return response


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
