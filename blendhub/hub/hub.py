"""A hub as one object: state, servers and clock put together on an event loop."""

import asyncio
import contextlib
import logging
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from blendhub.client.arena_view import HEADER_BYTES, SHM
from blendhub.contracts import ArenaFile, Server, SharedStore, Transport
from blendhub.core.errors import OptionError
from blendhub.core.plugin_choice import PluginChoice
from blendhub.framework.host import PluginHost
from blendhub.hub.config import DEFAULT_TRANSPORT, HubConfig, Listen, check_hub_config
from blendhub.hub.deletion import Deletion
from blendhub.hub.index.match_queues import MatchThreads
from blendhub.hub.index.table import IndexTable
from blendhub.hub.limits import INLINE_TOKENS
from blendhub.hub.memory.arena import Arena
from blendhub.hub.memory.cache import Cache
from blendhub.hub.memory.default_size import default_arena_bytes
from blendhub.hub.service import HubService
from blendhub.hub.state import HubState
from blendhub.hub.stores.follower import Follower
from blendhub.hub.stores.store_tier import StoreTier

log = logging.getLogger(__name__)
TICK_S = 0.2


class Hub:
    """``async with Hub(config):`` serves on the running event loop."""

    def __init__(self, config: HubConfig, host: PluginHost | None = None, private: PluginChoice | None = None) -> None:
        """``private``: the hub also serves by this transport, at an endpoint in a new directory of its own, which is
        the first of ``endpoints``. None: it does so only if the configuration names no endpoint.
        """
        self.config = config
        self._host = host or PluginHost.discover()
        self._private = private or (None if config.listen else DEFAULT_TRANSPORT)
        self._resources = contextlib.AsyncExitStack()
        self.service: HubService
        self.endpoints: tuple[str, ...] = ()
        self.metrics_address = ""

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
        check_hub_config(self.config, self._host)
        resources = self._resources
        arena = Arena(int(self.config.arena_gib * 2**30) or default_arena_bytes())
        resources.callback(arena.close)
        resources.push_async_callback(_cancelled, asyncio.create_task(arena.reserve()))
        self.service = await resources.enter_async_context(hub_service(self.config, self._host, arena))
        private = (self._private_endpoint(self._private),) if self._private else ()
        for listen in (*private, *self.config.listen):
            server = await self._serve(listen)
            resources.push_async_callback(server.close)
            self.endpoints += (server.endpoint,)
        if self.config.metrics:
            # An engine's own hub serves no pages, and where it runs the libraries for them may be absent.
            try:
                from blendhub.hub.http.pages import pages
                from blendhub.hub.http.server import http_server
            except ModuleNotFoundError as error:
                raise OptionError(
                    f"metrics = {self.config.metrics!r} needs {error.name}, which is not installed: run pip install "
                    "'blendhub[hub]', or set metrics = \"\", which serves no page"
                ) from error

            over_http = http_server(self.config.metrics, pages(self.service))
            self.metrics_address = await resources.enter_async_context(over_http)
        ticking = asyncio.create_task(self._tick())
        resources.callback(ticking.cancel)

    def _private_endpoint(self, choice: PluginChoice) -> Listen:
        """An endpoint of this transport, with a directory that only this user can enter."""
        folder = Path(tempfile.mkdtemp(prefix="blendhub-"))
        self._resources.callback(shutil.rmtree, folder, ignore_errors=True)
        transport: Transport = self._host.create("transport", choice.name, choice.options)
        return Listen(endpoint=transport.private_endpoint(folder), transport=choice.name, options=choice.options)

    async def _serve(self, listen: Listen) -> Server:
        transport: Transport = self._host.create("transport", listen.transport, listen.options)
        server: Server = await transport.serve(listen.endpoint, self.service)
        return server

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                self.service.tick()
            except Exception:  # one failing tick must not stop the later ones
                log.exception("the hub's periodic work failed: sessions that are silent now end later")


@contextlib.asynccontextmanager
async def hub_service(
    config: HubConfig,
    host: PluginHost,
    arena: Arena,
    clock: Callable[[], float] = time.monotonic,
    inline_tokens: int = INLINE_TOKENS,
) -> AsyncIterator[HubService]:
    """The service of a hub, without servers.

    What its own store holds is matchable already. What a shared store holds becomes matchable while the hub serves.
    """
    async with contextlib.AsyncExitStack() as resources:
        threads = MatchThreads(inline_tokens)
        resources.callback(threads.close)
        cache, indexes = Cache(arena), IndexTable(host, threads)
        tier, follower = None, None
        if config.store:
            store = await asyncio.to_thread(host.create, "store", config.store.name, config.store.options)
            tier = StoreTier(store, cache, indexes)
            resources.push_async_callback(tier.close)
            if isinstance(store, SharedStore):
                file = ArenaFile(str(SHM / arena.name.segment), HEADER_BYTES, arena.name.size)
                await asyncio.to_thread(store.attach, file, arena.slot(0, arena.name.size))
            else:
                # No server runs yet, so no other thread touches the state.
                await asyncio.to_thread(tier.restore)
        state = HubState(cache, indexes, tier)
        deletion = Deletion(state, tier)
        if tier and isinstance(tier.store, SharedStore):
            follower = Follower(indexes, tier, deletion.delete_here)
            follower.start()
            resources.push_async_callback(follower.close)
        service = HubService(config, state, tier, deletion, clock, follower)
        resources.callback(service.close)
        yield service


async def _cancelled(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.wait((task,))
