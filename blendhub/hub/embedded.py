"""A hub that belongs to one process and ends with it: in a thread of that process, or in a child process."""

import asyncio
import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from typing import Any, Self, TypeVar

from blendhub.client.hub_client import HubClient
from blendhub.core.plugin_choice import PluginChoice
from blendhub.framework.host import PluginHost
from blendhub.hub.child import ChildHub
from blendhub.hub.config import DEFAULT_TRANSPORT, HubConfig, HubPlacement
from blendhub.hub.hub import Hub

T = TypeVar("T")
START_TIMEOUT_S = 120.0


class EmbeddedHub(ABC):
    """A running hub. Close it, or use it as a context manager; closing removes its arena, sockets and threads."""

    endpoint: str
    """The endpoint for this user's other processes: a Unix socket, unless another transport was chosen for it."""

    metrics_address: str
    """HOST:PORT of /metrics and /healthz; empty if they are not served."""

    @abstractmethod
    def connect(self) -> HubClient:
        """A client in this process."""

    @abstractmethod
    def close(self) -> None:
        """Stop the hub. Closing twice is fine."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def embedded_hub(
    config: HubConfig | None = None,
    where: HubPlacement = "thread",
    host: PluginHost | None = None,
    transport: PluginChoice = DEFAULT_TRANSPORT,
) -> EmbeddedHub:
    """Start a hub in a thread of this process or in a child process, and wait until it serves.

    ``transport`` is that of ``EmbeddedHub.endpoint``; endpoints of the configuration come on top.
    """
    return (HubInThread if where == "thread" else HubInProcess)(config or HubConfig(), host, transport)


class HubInThread(EmbeddedHub):
    """A hub with an event loop in a thread; clients of this process exchange objects with it."""

    def __init__(
        self, config: HubConfig, host: PluginHost | None = None, transport: PluginChoice = DEFAULT_TRANSPORT
    ) -> None:
        self.inproc_endpoint = f"inproc://blendhub-{secrets.token_hex(8)}"
        """The endpoint of this hub for clients of this process, without a socket."""
        self._host = host or PluginHost.discover()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="blendhub-hub", daemon=True)
        self._thread.start()
        try:
            self.hub = self._run(self._start(config, transport))
        except BaseException:
            self._stop_loop()
            raise
        self.endpoint = self.hub.endpoints[0]
        self.metrics_address = self.hub.metrics_address

    def connect(self) -> HubClient:
        return HubClient(self.inproc_endpoint, "inproc", host=self._host)

    def close(self) -> None:
        if self._thread.is_alive():
            self._run(self.hub.__aexit__())
            self._stop_loop()

    async def _start(self, config: HubConfig, transport: PluginChoice) -> Hub:
        hub = await Hub(config, self._host, transport).__aenter__()
        await hub.serve_also("inproc", self.inproc_endpoint)
        return hub

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(START_TIMEOUT_S)

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class HubInProcess(EmbeddedHub):
    """A hub in a child process, which ends when this process does, even if this process is killed."""

    def __init__(
        self, config: HubConfig, host: PluginHost | None = None, transport: PluginChoice = DEFAULT_TRANSPORT
    ) -> None:
        self._host, self._transport = host, transport
        self._child = ChildHub(config, transport, START_TIMEOUT_S)
        self.endpoint, self.metrics_address = self._child.endpoint, self._child.metrics_address

    def connect(self) -> HubClient:
        return HubClient(self.endpoint, self._transport.name, self._transport.options, host=self._host)

    def close(self) -> None:
        self._child.close(START_TIMEOUT_S)
