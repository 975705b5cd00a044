"""A hub without transports: tests call its service directly, and set its clock."""

import asyncio
import inspect
import secrets
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from blendhub import PluginHost
from blendhub.client import wire
from blendhub.client.arena_view import HEADER_BYTES, SHM, ArenaView
from blendhub.contracts import ArenaFile, Envelope, SharedStore, Store
from blendhub.contracts.transport import Peer
from blendhub.core.layout import KVLayout, Namespace, Variant
from blendhub.core.plugin_choice import PluginChoice
from blendhub.core.spans import Span
from blendhub.core.tokens import Tokens
from blendhub.hub.config import HubConfig
from blendhub.hub.deletion import Deletion
from blendhub.hub.index.match_queues import MatchThreads
from blendhub.hub.index.table import IndexTable
from blendhub.hub.limits import INLINE_TOKENS
from blendhub.hub.memory.arena import Arena
from blendhub.hub.memory.cache import Cache
from blendhub.hub.service import HubService
from blendhub.hub.state import HubState
from blendhub.hub.stores.follower import Follower
from blendhub.hub.stores.store_tier import StoreTier
from blendhub.system.processes import ProcessId

HOST = PluginHost.discover()
CHUNK = 32
LAYOUT = KVLayout(layers=2, kv_heads=1, key_dim=4, value_dim=4, dtype="float16", chunk_tokens=CHUNK)
MATCHERS = (PluginChoice("prefix"), PluginChoice("rolling_hash", {"min_match_tokens": 16}))


def namespace(model: str = "m", world_size: int = 1, **more: Any) -> Namespace:
    return Namespace(model=model, world_size=world_size, **{"layout": LAYOUT, "matchers": MATCHERS, **more})


DEFAULT_NAMESPACE = namespace()
BASE = Variant()
ELSEWHERE = ProcessId("another machine", 1, 1)


def tokens(seed: int, length: int) -> Tokens:
    return np.random.default_rng(seed).integers(0, 2**32, length, dtype=np.uint32)


class Member:
    """One session and its requests. With a rank, it maps the arena unless ``maps`` is false."""

    def __init__(
        self,
        hub: "DirectHub",
        engine: str,
        rank: int,
        namespace: Namespace,
        process: ProcessId,
        maps: bool,
        peer: Peer = b"peer",
    ) -> None:
        self.hub, self.engine, self.rank, self.process = hub, engine, rank, process
        self.namespace, self.peer = namespace, peer
        self.client = secrets.randbits(62)
        self.view = ArenaView(hub.arena.name) if maps and rank >= 0 else None
        self.join()

    def join(self) -> None:
        self.registered = self.hub.ask(
            wire.Register(
                engine=self.engine,
                rank=self.rank,
                process=self.process,
                namespace=self.namespace,
                client=self.client,
            ),
            peer=self.peer,
        )
        if self.view:
            self.ask(wire.Mapped, nonce=self.view.name.nonce, mapping=self.view.mapping)

    def die(self) -> None:
        """The kernel removes a process's mapping, and reports its death."""
        self.view = None
        self.hub.state.process_died(self.process)

    def ask(self, kind: type, payload: Sequence[Any] = (), **fields: Any) -> Any:
        fields = {"session": self.registered.session, "epoch": self.registered.epoch, **fields}
        return self.hub.ask(kind(**fields), payload, self.peer)

    def lookup(self, prompt: Tokens, acquire: bool = True, **more: Any) -> wire.Found:
        lease = secrets.randbits(62) if acquire else None
        return self.ask(wire.Lookup, [prompt.tobytes()], lease=lease, **more)

    def read(self, prompt: Tokens, variant: Variant = BASE, **more: Any) -> wire.Found:
        """Look up, and take a lease on what is found."""
        return self.lookup(prompt, variant=variant, **more)

    def reserve(self, text: Tokens, span: Span | None = None, **more: Any) -> wire.Reserved:
        return self.ask(wire.Reserve, [text.tobytes()], span=span or Span(0, len(text)), **more)

    def commit(self, reserved: wire.Reserved, upto: int | None = None) -> None:
        self.ask(wire.Commit, lease=reserved.lease, upto=reserved.span.end if upto is None else upto)

    def shard(self, slot: int) -> np.ndarray:
        size = self.namespace.shard_bytes
        view = self.view or ArenaView(self.hub.arena.name)
        return view.slot(slot + self.rank * size, size)

    def write(self, reserved: wire.Reserved, text: Tokens) -> None:
        """Fill this rank's shards with bytes that depend on the tokens, their positions and the rank."""
        for slot in reserved.slots:
            self.shard(slot.slot)[: len(slot.span) * 4] = marks(text, slot.span, self.rank)

    def store(self, text: Tokens, span: Span | None = None, **more: Any) -> wire.Reserved:
        reserved = self.reserve(text, span, **more)
        if reserved.lease is not None:
            self.write(reserved, text)
            self.commit(reserved)
        return reserved

    def store_all(self, text: Tokens) -> int:
        """With as many reservations as a long text needs; returns the run."""
        run = None
        at = 0
        while at < len(text):
            reserved = self.store(text, Span(at, len(text)), run=run)
            run, at = reserved.run, reserved.span.end
        assert run is not None
        return run

    def check(self, found: wire.Found, prompt: Tokens) -> None:
        """Every piece holds the bytes that were written for these tokens at the positions it names."""
        for piece in found.pieces:
            rows = self.shard(piece.shard).view(np.uint32)[piece.row : piece.row + len(piece.span)]
            expected = prompt[piece.span.start : piece.span.end] ^ np.uint32(self.rank + 1)
            assert np.array_equal(rows, expected), "a piece holds other tokens' KV"


def spans_of(found: wire.Found) -> list[tuple[int, int, bool]]:
    """The pieces that were found, and whether each is exact."""
    exact = [match.span for match in found.matches if match.exact]
    return [
        (piece.span.start, piece.span.end, any(span.start <= piece.span.start < span.end for span in exact))
        for piece in found.pieces
    ]


def marks(text: Tokens, span: Span, rank: int) -> np.ndarray:
    return (text[span.start : span.end] ^ np.uint32(rank + 1)).view(np.uint8)


class DirectHub:
    """The service, on an event loop that runs only while a request is answered."""

    def __init__(
        self,
        config: HubConfig,
        n_slots: int,
        store: Path | Callable[[], Store] | None,
        inline_tokens: int = INLINE_TOKENS,
    ) -> None:
        """``store`` is the directory of a disk store, or opens another store."""
        self.config, self.n_slots, self.store, self.inline_tokens = config, n_slots, store, inline_tokens
        self.loop = asyncio.new_event_loop()
        self.now = 1000.0
        self.start()

    def start(self) -> None:
        self.arena = Arena(self.n_slots * namespace().slot_bytes)
        self.threads = MatchThreads(self.inline_tokens)
        cache, indexes = Cache(self.arena), IndexTable(HOST, self.threads)
        self.tier = None
        self.follower = None
        if self.store:
            store = self.store() if callable(self.store) else self._disk(self.store)
            self.tier = StoreTier(store, cache, indexes)
            if isinstance(store, SharedStore):
                size = self.arena.name.size
                store.attach(
                    ArenaFile(str(SHM / self.arena.name.segment), HEADER_BYTES, size), self.arena.slot(0, size)
                )
            else:
                self.tier.restore()
        self.state = HubState(cache, indexes, self.tier)
        deletion = Deletion(self.state, self.tier)
        if self.tier and self.tier.is_shared:
            self.follower = Follower(indexes, self.tier, deletion.delete_here)
            self.run(self._start_following())
        self.service = HubService(self.config, self.state, self.tier, deletion, lambda: self.now, self.follower)

    @staticmethod
    def _disk(path: Path) -> Store:
        return HOST.create("store", "disk", {"path": str(path), "capacity_gib": 64 * 2**10 / 2**30})

    async def _start_following(self) -> None:
        self.follower.start()

    def ask(self, message: Any, payload: Sequence[Any] = (), peer: Peer = b"peer") -> Any:
        """The reply's message; raises the error if there is one."""
        return self.envelope(message, payload, peer).message

    def envelope(self, message: Any, payload: Sequence[Any] = (), peer: Peer = b"peer") -> Envelope:
        # Through the codec, which checks the bounds of peers' values.
        codec = self.service.codec
        decoded = codec.decode(codec.encode(message))

        async def answer() -> Envelope:
            answered = self.service.handle(peer, Envelope(decoded, payload))
            return await answered if inspect.isawaitable(answered) else answered

        return self.run(answer())

    def run(self, work: Awaitable[Any]) -> Any:
        return self.loop.run_until_complete(work)

    def settle(self) -> None:
        """Wait until no chunk waits to be loaded, or to be saved, unless the store fails."""
        failures = self.tier.failures if self.tier else 0
        while self.tier and (self.state.cache.filling or (self.tier.writer.waiting and self.tier.failures == failures)):
            self.run(asyncio.sleep(0.001))

    def join(self, engine: str = "e", rank: int = 0, namespace: Namespace | None = None, **more: Any) -> Member:
        process = more.get("process") or ProcessId.mine()
        maps, peer = more.get("maps", True), more.get("peer", b"peer")
        return Member(self, engine, rank, namespace or DEFAULT_NAMESPACE, process, maps, peer)

    def stop(self) -> None:
        async def end() -> None:
            self.service.close()
            if self.follower:
                await self.follower.close()
            if self.tier:
                await self.tier.close()

        self.run(end())
        self.threads.close()
        self.arena.close()

    def restart(self) -> None:
        """Another hub with what the store has; engines register anew."""
        self.settle()
        self.stop()
        self.start()

    def close(self) -> None:
        self.stop()
        self.loop.close()
