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
from blendhub.client.arena_view import ArenaView
from blendhub.contracts import Envelope, Store
from blendhub.contracts.transport import Peer
from blendhub.core.layout import KVLayout, Namespace, Variant
from blendhub.core.plugin_choice import PluginChoice
from blendhub.core.spans import Span
from blendhub.core.tokens import Tokens
from blendhub.hub.config import HubConfig, StoreChoice
from blendhub.hub.hub import hub_service
from blendhub.hub.limits import INLINE_TOKENS
from blendhub.hub.memory.arena import Arena
from blendhub.system.processes import ProcessId

HOST = PluginHost.discover()
CHUNK = 32
LAYOUT = KVLayout(layers=2, kv_heads=1, key_dim=4, value_dim=4, dtype="float16", chunk_tokens=CHUNK)
STATE_ROWS = KVLayout(layers=3, kv_heads=1, key_dim=99, value_dim=0, dtype="int8", chunk_tokens=8)
MATCHERS = (PluginChoice("prefix"), PluginChoice("rolling_hash", {"min_match_tokens": 16}))


def namespace(model: str = "m", world_size: int = 1, **more: Any) -> Namespace:
    return Namespace(model=model, world_size=world_size, **{"layout": LAYOUT, "matchers": MATCHERS, **more})


DEFAULT_NAMESPACE = namespace()
BASE = Variant()
ELSEWHERE = ProcessId("another machine", 1, 1)


def tokens(seed: int, length: int) -> Tokens:
    return np.random.default_rng(seed).integers(0, 2**32, length, dtype=np.uint32)


def marks(text: Tokens, span: Span, rank: int) -> np.ndarray:
    """The bytes that stand for the KV of a span: they depend on its tokens and on the rank."""
    return (text[span.start : span.end] ^ np.uint32(rank + 1)).view(np.uint8)


class Member:
    """One session and its requests. With a rank, it maps the arena unless ``maps`` is false."""

    def __init__(
        self,
        hub: "DirectHub",
        engine: str = "e",
        rank: int = 0,
        namespace: Namespace = DEFAULT_NAMESPACE,
        process: ProcessId | None = None,
        maps: bool = True,
    ) -> None:
        self.hub, self.engine, self.rank, self.namespace = hub, engine, rank, namespace
        self.process = process or ProcessId.mine()
        self.client = secrets.randbits(62)
        self.view = ArenaView(hub.arena.name) if maps and rank >= 0 else None
        self.join()

    def join(self) -> None:
        registration = wire.Register(
            engine=self.engine, rank=self.rank, process=self.process, namespace=self.namespace, client=self.client
        )
        self.registered = self.hub.ask(registration)
        if self.view:
            self.ask(wire.Mapped, nonce=self.view.name.nonce, mapping=self.view.mapping)

    @property
    def ids(self) -> dict[str, int]:
        return {"session": self.registered.session, "epoch": self.registered.epoch}

    def ask(self, kind: type, payload: Sequence[Any] = (), **fields: Any) -> Any:
        return self.hub.ask(kind(**{**self.ids, **fields}), payload)

    def lookup(self, prompt: Tokens, acquire: bool = True, **more: Any) -> wire.Found:
        lease = secrets.randbits(62) if acquire else None
        return self.ask(wire.Lookup, [prompt.tobytes()], lease=lease, **more)

    def read(self, prompt: Tokens, variant: Variant = BASE, **more: Any) -> int:
        """How many tokens of a prompt come; all of them are checked."""
        found = self.lookup(prompt, variant=variant, wait_s=10.0, **more)
        self.check(found, prompt)
        if found.lease is not None:
            self.ask(wire.Release, lease=found.lease)
        return sum(len(piece.span) for piece in found.pieces)

    def reserve(self, text: Tokens, span: Span | None = None, **more: Any) -> wire.Reserved:
        return self.ask(wire.Reserve, [text.tobytes()], span=span or Span(0, len(text)), **more)

    def commit(self, reserved: wire.Reserved, upto: int | None = None) -> None:
        self.ask(wire.Commit, lease=reserved.lease, upto=reserved.span.end if upto is None else upto)

    def shard(self, slot: int) -> np.ndarray:
        size = self.namespace.shard_bytes
        view = self.view or ArenaView(self.hub.arena.name)
        return view.slot(slot + self.rank * size, size)

    def write(self, reserved: wire.Reserved, text: Tokens) -> None:
        for slot in reserved.slots:
            self.shard(slot.slot)[: len(slot.span) * 4] = marks(text, slot.span, self.rank)

    def store(self, text: Tokens, span: Span | None = None, **more: Any) -> wire.Reserved:
        reserved = self.reserve(text, span, **more)
        if reserved.lease is not None:
            self.write(reserved, text)
            self.commit(reserved)
        return reserved

    def store_all(self, text: Tokens, **more: Any) -> None:
        """With as many reservations as a long text needs."""
        run, at = None, 0
        while at < len(text):
            reserved = self.store(text, Span(at, len(text)), run=run, **more)
            run, at = reserved.run, reserved.span.end

    def check(self, found: wire.Found, prompt: Tokens) -> None:
        """Every piece holds the bytes that were written for these tokens at the positions it names."""
        for piece in found.pieces:
            rows = self.shard(piece.shard)[4 * piece.row : 4 * (piece.row + len(piece.span))]
            assert np.array_equal(rows, marks(prompt, piece.span, self.rank)), "a piece holds other tokens' KV"


class HostOfOneStore:
    """A host whose store is the one that a test opens."""

    def __init__(self, open_store: Callable[[], Store]) -> None:
        self._open_store = open_store

    def create(self, kind: str, *choice: Any) -> Any:
        return self._open_store() if kind == "store" else HOST.create(kind, *choice)


class DirectHub:
    """The service, on an event loop that runs only while a request is answered."""

    def __init__(
        self, n_slots: int, store: Path | Callable[[], Store] | None = None, inline: int = INLINE_TOKENS, **config: Any
    ) -> None:
        """``store`` is the directory of a disk store, or opens another store. ``inline``: the most tokens that are
        matched on the loop.
        """
        self.n_slots, self.inline = n_slots, inline
        self.host: Any = HostOfOneStore(store) if callable(store) else HOST
        disk = {"path": str(store), "capacity_gib": 64 * 2**10 / 2**30} if isinstance(store, Path) else {}
        self.config = HubConfig(store=StoreChoice(options=disk) if store else None, **config)
        self.loop = asyncio.new_event_loop()
        self.now = 1000.0
        self.start()

    def start(self) -> None:
        self.arena = Arena(self.n_slots * namespace().slot_bytes)
        self._serving = hub_service(self.config, self.host, self.arena, lambda: self.now, self.inline)
        self.service = self.run(self._serving.__aenter__())
        self.state, self.tier, self.follower = self.service.state, self.service.tier, self.service.follower

    def ask(self, message: Any, payload: Sequence[Any] = (), peer: Peer = b"peer") -> Any:
        """The reply's message; raises the error if there is one."""
        return self.envelope(message, payload, peer).message

    def envelope(self, message: Any, payload: Sequence[Any] = (), peer: Peer = b"peer") -> Envelope:
        # Through the codec, which checks the bounds of peers' values.
        codec = self.service.codec
        return self.run(self.answer(codec.decode(codec.encode(message)), payload, peer))

    async def answer(self, message: Any, payload: Sequence[Any] = (), peer: Peer = b"peer") -> Envelope:
        answered = self.service.handle(peer, Envelope(message, payload))
        return await answered if inspect.isawaitable(answered) else answered

    def run(self, work: Awaitable[Any]) -> Any:
        return self.loop.run_until_complete(work)

    def settle(self) -> None:
        """Wait until no chunk waits to be loaded, or to be saved, unless the store fails."""
        failures = self.tier.failures if self.tier else 0
        while self.tier and (self.state.cache.filling or (self.tier.writer.waiting and self.tier.failures == failures)):
            self.run(asyncio.sleep(0.001))

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.service.tick()

    def join(self, engine: str = "e", **more: Any) -> Member:
        return Member(self, engine, **more)

    @property
    def index(self) -> Any:
        """The only index."""
        (index,) = self.state.indexes
        return index

    def stop(self) -> None:
        self.run(self._serving.__aexit__(None, None, None))
        self.arena.close()

    def restart(self) -> None:
        """Another hub with what the store has; engines register anew."""
        self.settle()
        self.stop()
        self.start()

    def close(self) -> None:
        if not self.loop.is_closed():
            self.stop()
            self.loop.close()
