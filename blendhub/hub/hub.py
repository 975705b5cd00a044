"""A hub as one object: state, doors and clock put together on an event loop."""

import asyncio
import contextlib
import logging
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from blendhub.config import HubConfig, Listen
from blendhub.contracts import Server
from blendhub.errors import HubError
from blendhub.host import PluginHost
from blendhub.hub.arena import Arena
from blendhub.hub.eviction import POLICIES
from blendhub.hub.index import NamespaceIndex
from blendhub.hub.memory import default_arena_bytes
from blendhub.hub.metrics import MetricsServer
from blendhub.hub.service import HubService
from blendhub.hub.state import HubState
from blendhub.hub.tiers import Tier
from blendhub.layout import DEFAULT_MATCHERS

if TYPE_CHECKING:
    from blendhub.hub.embedded import EmbeddedHub

log = logging.getLogger(__name__)
TICK_S = 0.2


class Hub:
    """``async with Hub(config):`` serves on the running loop; :meth:`embedded` needs no loop."""

    def __init__(self, config: HubConfig, host: PluginHost | None = None) -> None:
        self.config = config
        self._host = host or PluginHost.discover()
        self._resources = contextlib.AsyncExitStack()
        self.service: HubService
        self.endpoints: tuple[str, ...] = ()
        self.metrics_address = ""
        self.restored_chunks = 0

    @staticmethod
    def embedded(
        config: HubConfig | None = None, where: Literal["thread", "process"] = "thread", host: PluginHost | None = None
    ) -> "EmbeddedHub":
        """A hub of this process's own, in a thread of it or in a child process. Close it when it is of no more use."""
        from blendhub.hub.embedded import HubInProcess, HubInThread

        return (HubInThread if where == "thread" else HubInProcess)(config or HubConfig(), host)

    async def serve_also(self, transport: str, endpoint: str) -> None:
        """Open one more door."""
        server = await self._open(Listen(endpoint=endpoint, transport=transport))
        self._resources.push_async_callback(server.close)

    async def __aenter__(self) -> "Hub":
        try:
            await self._start()
        except BaseException:
            await self._resources.aclose()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._resources.aclose()

    async def _start(self) -> None:
        resources = self._resources
        wanted = self.config.arena_gib
        arena = await Arena.made(int(wanted * 2**30) if wanted else default_arena_bytes())
        resources.callback(arena.close)
        state = HubState(arena, POLICIES[self.config.policy](), lambda namespace: NamespaceIndex(namespace, self._host))
        tier = None
        if self.config.store:
            choice = self.config.store
            store = await asyncio.to_thread(self._host.create, "store", choice.name, choice.options)
            tier = Tier(store, state.cache, state.indexes)
            resources.push_async_callback(tier.close)
            state.save = tier.save
            # Before the doors open, so nobody else touches the state.
            self.restored_chunks = await asyncio.to_thread(tier.restore, state.index_for, state.next_id)
        await asyncio.to_thread(self._load_default_matchers)
        self.service = HubService(self.config, state, tier, time.monotonic)
        resources.callback(self.service.close)
        for door in self.config.listen or (self._private_door(),):
            server = await self._open(door)
            resources.push_async_callback(server.close)
            self.endpoints += (server.endpoint,)
        if self.config.metrics:
            metrics = MetricsServer(self.service.numbers)
            self.metrics_address = await metrics.start(self.config.metrics)
            resources.push_async_callback(metrics.close)
        ticking = asyncio.create_task(self._tick())
        resources.callback(ticking.cancel)

    def _load_default_matchers(self) -> None:
        """Their compiled code is in memory before the first engine asks, which then need not wait for it."""
        for choice in DEFAULT_MATCHERS:
            self._host.create("matcher", choice.name, choice.options)

    def _private_door(self) -> Listen:
        """A Unix socket in a directory that only this user can enter."""
        folder = Path(tempfile.mkdtemp(prefix="blendhub-"))
        self._resources.callback(shutil.rmtree, folder, ignore_errors=True)
        return Listen(endpoint=f"ipc://{folder}/hub.sock")

    async def _open(self, door: Listen) -> Server:
        transport = self._host.create("transport", door.transport, door.options)
        if not door.endpoint.startswith(transport.schemes):
            raise HubError(
                f"the transport {door.transport!r} understands endpoints that begin with "
                f"{' or '.join(transport.schemes)}, not {door.endpoint!r}; choose another transport for it"
            )
        server: Server = await transport.serve(door.endpoint, self.service)
        return server

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                self.service.tick()
            except Exception:  # a fault here must not end the housekeeping
                log.exception("housekeeping failed")
