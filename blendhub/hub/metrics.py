"""An HTTP server for ``/metrics`` (Prometheus) and ``/healthz``."""

import asyncio
from collections.abc import Callable

from blendhub.errors import HubError, OptionError
from blendhub.hub.limits import MOST_METRICS_CONNECTIONS, MOST_METRICS_REQUEST_BYTES
from blendhub.wire import HubStats

READ_TIMEOUT_S = 5.0
PREFIX = "blendhub_"


def exposition(stats: HubStats) -> str:
    """The numbers in Prometheus' text format."""
    lines: list[str] = []
    for name, value in sorted(stats.counters.items()):
        lines += [f"# TYPE {PREFIX}{name}_total counter", f"{PREFIX}{name}_total {value}"]
    for name, value in sorted(stats.gauges.items()):
        lines += [f"# TYPE {PREFIX}{name} gauge", f"{PREFIX}{name} {value}"]
    names = sorted({name for of_namespace in stats.namespaces.values() for name in of_namespace})
    for name in names:
        lines.append(f"# TYPE {PREFIX}namespace_{name} gauge")
        for digest, of_namespace in sorted(stats.namespaces.items()):
            lines.append(f'{PREFIX}namespace_{name}{{namespace="{digest}"}} {of_namespace[name]}')
    return "\n".join(lines) + "\n"


class MetricsServer:
    """Answers GET on two paths, one request a connection."""

    def __init__(self, stats: Callable[[], HubStats]) -> None:
        self._stats = stats
        self._server: asyncio.Server | None = None
        self._open: dict[asyncio.StreamWriter, None] = {}
        """The connections that have not been answered, the oldest first."""
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
            async with asyncio.timeout(READ_TIMEOUT_S):
                request = (await reader.readuntil(b"\r\n\r\n")).split(b" ", 2)
                status, text = self._page(*request[:2])
                body = text.encode()
                head = (
                    f"HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4\r\nContent-Length: {len(body)}\r\n"
                )
                writer.write(f"{head}Connection: close\r\n\r\n".encode() + body)
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # no request of this protocol, or no reader of the answer
        finally:
            self._open.pop(writer, None)
            writer.transport.abort()

    def _page(self, method: bytes, path: bytes = b"") -> tuple[str, str]:
        if method != b"GET":
            return "405 Method Not Allowed", "only GET\n"
        if path == b"/metrics":
            return "200 OK", exposition(self._stats())
        if path == b"/healthz":
            return "200 OK", "ok\n"
        return "404 Not Found", "this server has /metrics and /healthz\n"
