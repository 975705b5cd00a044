"""An HTTP server on the hub's event loop, by uvicorn."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator

import uvicorn
from starlette.applications import Starlette

from blendhub.core.errors import HubError
from blendhub.hub.config import host_and_port


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the process that the hub runs in."""
        yield


@contextlib.asynccontextmanager
async def http_server(address: str, application: Starlette) -> AsyncIterator[str]:
    """Serve at HOST:PORT; yields the address with the actual port."""
    host, port = host_and_port(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host.strip("[]"), port), family=family)
    except OSError as error:
        raise HubError(f"cannot serve metrics at {address}: {error}; set metrics to another HOST:PORT") from error
    config = uvicorn.Config(
        application,
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=1,
    )
    server = _Server(config)
    serving = asyncio.create_task(server.serve([listener]))
    try:
        yield f"{host}:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving
