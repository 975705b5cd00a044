"""A hub that belongs to one process and ends with it: in a thread of that process, or in a child process."""

import asyncio
import threading
from abc import ABC, abstractmethod
from concurrent.futures import Future
from typing import Self

from blendhub.client.hub_client import HubClient
from blendhub.core.errors import HubError
from blendhub.core.plugin_choice import PluginChoice
from blendhub.framework.host import PluginHost
from blendhub.hub.child import ChildHub
from blendhub.hub.config import DEFAULT_TRANSPORT, HubConfig, HubPlacement
from blendhub.hub.hub import Hub

START_TIMEOUT_S = 120.0


class EmbeddedHub(ABC):
    """A running hub. Close it, or use it as a context manager; closing removes its arena, sockets and threads."""

    endpoint: str
    """The endpoint for this user's other processes: a Unix socket, unless another transport was chosen for it."""

    transport: PluginChoice
    """The transport of the endpoint."""

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
    """A hub with an event loop in a thread of this process."""

    def __init__(
        self, config: HubConfig, host: PluginHost | None = None, transport: PluginChoice = DEFAULT_TRANSPORT
    ) -> None:
        self._host, self.transport = host or PluginHost.discover(), transport
        self.hub = Hub(config, self._host, transport)
        self._is_over = asyncio.Event()
        self._started: Future[asyncio.AbstractEventLoop] = Future()
        """The thread's event loop, or the error that kept the hub from starting."""
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="blendhub-hub", daemon=True)
        self._thread.start()
        try:
            self._loop = self._started.result()
        except Exception:
            self._thread.join()
            raise
        self.endpoint, self.metrics_address = self.hub.endpoints[0], self.hub.metrics_address

    def connect(self) -> HubClient:
        return HubClient(self.endpoint, self.transport.name, self.transport.options, host=self._host)

    def close(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._is_over.set)
            self._thread.join()

    async def _serve(self) -> None:
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await self.hub.__aenter__()
        except TimeoutError:
            self._started.set_exception(HubError(f"the hub did not start in {START_TIMEOUT_S:g} s"))
            return
        except BaseException as error:
            self._started.set_exception(error)
            return
        self._started.set_result(asyncio.get_running_loop())
        await self._is_over.wait()
        await self.hub.__aexit__()


class HubInProcess(EmbeddedHub):
    """A hub in a child process, which ends when this process does, even if this process is killed."""

    def __init__(
        self, config: HubConfig, host: PluginHost | None = None, transport: PluginChoice = DEFAULT_TRANSPORT
    ) -> None:
        self._host, self.transport = host, transport
        self._child = ChildHub(config, transport, START_TIMEOUT_S)
        self.endpoint, self.metrics_address = self._child.endpoint, self._child.metrics_address

    def connect(self) -> HubClient:
        return HubClient(self.endpoint, self.transport.name, self.transport.options, host=self._host)

    def close(self) -> None:
        self._child.close(START_TIMEOUT_S)
