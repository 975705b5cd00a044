"""A hub that belongs to one process, and ends with it: in a thread of that process, or in a child."""

import asyncio
import multiprocessing
import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from blendhub.client import HubClient
from blendhub.config import HubConfig
from blendhub.errors import HubError
from blendhub.host import PluginHost
from blendhub.hub.gc_tuning import disable_full_collections
from blendhub.hub.hub import Hub

T = TypeVar("T")
START_TIMEOUT_S = 120.0


class EmbeddedHub(ABC):
    """A running hub. Close it, or use it as a context manager; after that nothing of it is left."""

    endpoint: str
    """A Unix socket, for the other processes of this user."""

    metrics_address: str
    """HOST:PORT of /metrics and /healthz; empty if they are not served."""

    @abstractmethod
    def connect(self) -> HubClient:
        """A client in this process."""

    @abstractmethod
    def close(self) -> None:
        """End it. Closing twice is fine."""

    def __enter__(self) -> "EmbeddedHub":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class HubInThread(EmbeddedHub):
    """A hub with a thread and an event loop of its own; clients of this process exchange objects with it."""

    def __init__(self, config: HubConfig, host: PluginHost | None = None) -> None:
        self.inproc_endpoint = f"inproc://blendhub-{secrets.token_hex(8)}"
        """The same hub for clients of this process, without a socket."""
        self._host = host or PluginHost.discover()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="blendhub-hub", daemon=True)
        self._thread.start()
        try:
            self.hub = self._run(self._begin(config))
        except BaseException:
            self._end_loop()
            raise
        self.endpoint = self.hub.endpoints[0]
        self.metrics_address = self.hub.metrics_address

    def connect(self) -> HubClient:
        return HubClient(self.inproc_endpoint, "inproc", host=self._host)

    def close(self) -> None:
        if self._thread.is_alive():
            self._run(self.hub.__aexit__())
            self._end_loop()

    async def _begin(self, config: HubConfig) -> Hub:
        hub = await Hub(config, self._host).__aenter__()
        await hub.serve_also("inproc", self.inproc_endpoint)
        return hub

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(START_TIMEOUT_S)

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class HubInProcess(EmbeddedHub):
    """A hub in a child process, which ends when this process does, however that ends."""

    def __init__(self, config: HubConfig, host: PluginHost | None = None) -> None:
        self._host = host
        # A fresh interpreter: a fork would inherit threads' locks, and devices that cannot be shared.
        processes = multiprocessing.get_context("spawn")
        self._line, theirs = processes.Pipe()
        self._process = processes.Process(target=_serve_child, args=(config, theirs), name="blendhub-hub", daemon=True)
        self._process.start()
        theirs.close()
        try:
            answer = self._line.recv() if self._line.poll(START_TIMEOUT_S) else "it did not answer in time"
        except EOFError:
            answer = f"its process ended with exit code {self._process.exitcode}"
        if isinstance(answer, str):
            self.close()
            raise HubError(f"the hub did not start: {answer}")
        self.endpoint, self.metrics_address = answer

    def connect(self) -> HubClient:
        return HubClient(self.endpoint, host=self._host)

    def close(self) -> None:
        self._line.close()
        self._process.join(START_TIMEOUT_S)


def _serve_child(config: HubConfig, line: Connection) -> None:
    """Serve until the other end of the line is closed, by its owner or by its owner's death."""
    disable_full_collections()

    async def serve() -> None:
        ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(line.fileno(), ended.set)
        async with Hub(config) as hub:
            line.send((hub.endpoints[0], hub.metrics_address))
            await ended.wait()

    try:
        asyncio.run(serve())
    except Exception as error:
        line.send(f"{error}")
