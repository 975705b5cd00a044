"""A hub that belongs to one process and ends with it: in a thread of that process, or in another one."""

import asyncio
import os
import signal
import socket
import subprocess
import threading
from abc import ABC, abstractmethod
from concurrent.futures import Future
from contextlib import suppress
from typing import Self

import msgspec

from blendhub.client.hub_client import HubClient
from blendhub.core.errors import HubError
from blendhub.core.plugin_choice import PluginChoice
from blendhub.framework.host import PluginHost
from blendhub.hub.child import StartReply
from blendhub.hub.config import DEFAULT_TRANSPORT, HubConfig, HubPlacement
from blendhub.hub.hub import Hub
from blendhub.system.processes import importing_the_same, python_module

START_TIMEOUT_S = 120.0


class EmbeddedHub(ABC):
    """A running hub. Close it, or use it as a context manager; closing removes its arena, sockets and threads."""

    endpoint: str
    """The endpoint for this user's processes: a Unix socket, unless another transport was chosen for it."""

    metrics_address: str
    """HOST:PORT of /metrics and /healthz; empty if they are not served."""

    def __init__(self, host: PluginHost | None, transport: PluginChoice) -> None:
        """``transport``: of the endpoint."""
        self.transport = transport
        self._host = host

    def connect(self) -> HubClient:
        """A client in this process."""
        return HubClient(self.endpoint, self.transport.name, self.transport.options, host=self._host)

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
    """Start a hub in a thread of this process or in another process, and wait until it serves.

    ``transport`` is that of ``EmbeddedHub.endpoint``; endpoints of the configuration come on top.
    """
    return (HubInThread if where == "thread" else HubInProcess)(config or HubConfig(), host, transport)


class HubInThread(EmbeddedHub):
    """A hub with an event loop in a thread of this process."""

    def __init__(
        self, config: HubConfig, host: PluginHost | None = None, transport: PluginChoice = DEFAULT_TRANSPORT
    ) -> None:
        host = host or PluginHost.discover()
        super().__init__(host, transport)
        self.hub = Hub(config, host, transport)
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
    """A hub in another process, which ends when this process does, even if this process is killed."""

    def __init__(
        self, config: HubConfig, host: PluginHost | None = None, transport: PluginChoice = DEFAULT_TRANSPORT
    ) -> None:
        super().__init__(host, transport)
        self.pid: int | None = None
        self._line, child_end = socket.socketpair()
        with child_end:
            # The command ends when it has left the hub to run by itself.
            subprocess.run(
                python_module("blendhub.hub.child", str(child_end.fileno())),
                pass_fds=[child_end.fileno()],
                stdin=subprocess.DEVNULL,
                # A Ctrl-C in a terminal is meant for the owner, which still needs its hub while it ends.
                start_new_session=True,
                env=importing_the_same(),
                check=False,
            )
        try:
            reply = self._start(config)
        except BaseException:
            self.close()
            raise
        self.endpoint, self.metrics_address = reply.endpoint, reply.metrics_address

    def close(self) -> None:
        """End the process in order, so that it removes its arena and sockets."""
        if self._line.fileno() < 0:
            return
        with self._line, suppress(ConnectionError, ProcessLookupError):
            self._line.shutdown(socket.SHUT_WR)
            try:
                self._line.recv(1)  # nothing, when the process has closed its end
            except TimeoutError:
                if self.pid:
                    os.kill(self.pid, signal.SIGKILL)

    def _start(self, config: HubConfig) -> StartReply:
        # ``config`` may have its owner's keys beside the hub's.
        fields = {name: getattr(config, name) for name in HubConfig.__struct_fields__}
        self._line.settimeout(START_TIMEOUT_S)
        try:
            self._line.sendall(msgspec.json.encode((fields, self.transport)) + b"\n")
            lines = self._line.makefile("rb")
            self.pid = int(lines.readline() or 0) or None
            line = lines.readline()
        except TimeoutError:
            text = f"the hub did not start: its process did not answer in {START_TIMEOUT_S:g} s"
            raise HubError(text) from None
        except OSError:
            line = b""
        if not line:
            raise HubError("the hub did not start: its process ended before it answered")
        reply = msgspec.json.decode(line, type=StartReply)
        if reply.error:
            raise HubError(f"the hub did not start: {reply.error}")
        return reply
