"""A small HTTP server on loopback: everyone may read, and the user that the hub runs as may delete KV and ask for
scores.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple, Protocol, TypeAlias
from weakref import WeakKeyDictionary

from blendhub.core.errors import HubError, OptionError
from blendhub.hub.http.owner import is_own
from blendhub.hub.limits import MOST_METRICS_CONNECTIONS, MOST_METRICS_REQUEST_BYTES, MOST_SCORE_BYTES

READ_TIMEOUT_S = 5.0
DELETE_TIMEOUT_S = 60.0
SLICE_BYTES, PAUSE_S = 2**16, 0.002
"""The JSON of the page has MBs. Each reader gets 30 MB a second, so that those who ask without a pause take no core."""

MOST_UNREAD_BYTES = 2**24
"""What is received, and dropped, of a refused request: a million token ids, so that their client reads the answer."""

TEXT = "text/plain; version=0.0.4"
# A page loads nothing from elsewhere, and runs no script but its own.
GUARDS = (
    "Content-Security-Policy: default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'\r\n"
    "X-Content-Type-Options: nosniff\r\nReferrer-Policy: no-referrer\r\nCache-Control: no-store\r\n"
)


class Page(NamedTuple):
    """An HTTP answer."""

    status: str
    kind: str
    body: bytes


Route: TypeAlias = Callable[[str, str], Awaitable[Page]]
"""Answers a request for a path with its query, from a client that names the server as it does in ``Host``."""


class Posts(Protocol):
    """Answers POST requests."""

    def refusal(self, target: str, headers: Mapping[str, str], is_own: Callable[[], bool]) -> Page | None:
        """Why a request is not answered; None: its body may be read."""

    async def answer(self, body: bytes) -> Page: ...


class MetricsServer:
    """An HTTP server that answers one request a connection: GET, and DELETE of this user's processes. Only POST
    requests follow each other on a connection: routers send many.
    """

    def __init__(self, pages: Route, deletes: Route, posts: Posts | None = None) -> None:
        """``posts``: None: POST is refused."""
        self._pages = pages
        self._deletes = deletes
        self._posts = posts
        self._server: asyncio.Server | None = None
        self._open: dict[asyncio.StreamWriter, None] = {}
        """The connections that have not been answered, the oldest first."""
        self._own: WeakKeyDictionary[asyncio.StreamWriter, bool] = WeakKeyDictionary()
        self._answering: set[asyncio.Task[None]] = set()

    async def start(self, address: str) -> str:
        """Listen at HOST:PORT; returns the address with the actual port."""
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise OptionError(f"metrics = {address!r} should be HOST:PORT, such as 127.0.0.1:9464")
        try:
            self._server = await asyncio.start_server(
                self._answer,
                host.strip("[]"),
                int(port),
                limit=MOST_METRICS_REQUEST_BYTES,
                backlog=MOST_METRICS_CONNECTIONS,
            )
        except OSError as error:
            raise HubError(f"cannot serve metrics at {address}: {error}; set metrics to another HOST:PORT") from error
        return f"{host}:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        if self._server:
            self._server.close()
            for writer in self._open:
                writer.transport.abort()
            if self._answering:
                await asyncio.wait(self._answering)
            await self._server.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._open) >= MOST_METRICS_CONNECTIONS:
            # The oldest one: a client that asks at once is answered, however many wait without asking.
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.transport.abort()
        self._open[writer] = None
        answering = asyncio.current_task()
        assert answering
        self._answering.add(answering)
        answering.add_done_callback(self._answering.discard)
        try:
            while await self._answer_next(reader, writer):
                # It was answered last, so that it is the last to be closed for others.
                self._open.pop(writer, None)
                self._open[writer] = None
            await writer.wait_closed()
        except (OSError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # no request of this protocol, or no reader of the answer
        finally:
            self._open.pop(writer, None)
            writer.transport.abort()

    async def _answer_next(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; returns whether another one may follow."""
        async with asyncio.timeout(READ_TIMEOUT_S):
            request = await reader.readuntil(b"\r\n\r\n")
        first, *lines = request.decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        method, _, target = first.partition(" ")
        target = target.partition(" ")[0]
        goes_on = False
        async with asyncio.timeout(DELETE_TIMEOUT_S if method == "DELETE" else READ_TIMEOUT_S):
            if method == "POST" and self._posts:
                page, goes_on = await self._posted(self._posts, target, headers, reader, writer)
            else:
                page = await self._page(method, target, headers, writer)
            head = f"HTTP/1.1 {page.status}\r\nContent-Type: {page.kind}\r\nContent-Length: {len(page.body)}\r\n"
            writer.write(f"{head}{GUARDS}Connection: {'keep-alive' if goes_on else 'close'}\r\n\r\n".encode())
            for at in range(0, len(page.body), SLICE_BYTES):
                writer.write(page.body[at : at + SLICE_BYTES])
                await writer.drain()
                if at + SLICE_BYTES < len(page.body):
                    await asyncio.sleep(PAUSE_S)
            if method == "POST" and not goes_on:
                # Closing while the body still arrives would destroy the answer.
                writer.write_eof()
                left = MOST_UNREAD_BYTES
                while left > 0 and (unread := await reader.read(SLICE_BYTES)):
                    left -= len(unread)
        if not goes_on:
            writer.close()
        return goes_on

    async def _posted(
        self,
        posts: Posts,
        target: str,
        headers: Mapping[str, str],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> tuple[Page, bool]:
        """The answer, and whether the whole request was read."""
        refused = posts.refusal(target, headers, lambda: self._is_own(writer))
        if refused:
            return refused, False
        length = headers.get("content-length", "")
        if not (length.isascii() and length.isdigit()):
            return Page("411 Length Required", TEXT, b"the request needs a Content-Length\n"), False
        if len(length) > 9 or int(length) > MOST_SCORE_BYTES:
            return Page("413 Content Too Large", TEXT, f"at most {MOST_SCORE_BYTES:,} bytes\n".encode()), False
        if headers.get("expect", "").lower() == "100-continue":  # curl waits a second for it
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return await posts.answer(await reader.readexactly(int(length))), True

    def _is_own(self, writer: asyncio.StreamWriter) -> bool:
        """Looked up once for each connection: the kernel's table has a row for every connection of the machine."""
        own = self._own.get(writer)
        if own is None:
            own = self._own[writer] = is_own(writer.get_extra_info("socket"))
        return own

    async def _page(self, method: str, target: str, headers: Mapping[str, str], writer: asyncio.StreamWriter) -> Page:
        if method not in ("GET", "DELETE"):
            return Page("405 Method Not Allowed", TEXT, b"only GET, DELETE and POST\n")
        if method == "DELETE" and not is_own(writer.get_extra_info("socket")):
            return Page("403 Forbidden", TEXT, b"only the hub's own user may delete here; see blendhub forget\n")
        answer = self._pages if method == "GET" else self._deletes
        return await answer(target, headers.get("host", ""))
