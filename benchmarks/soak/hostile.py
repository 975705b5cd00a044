"""Messages that decode and mean harm: other sessions' ids, spans that overlap or are huge, values at each limit.

Each is drawn from what a registered client can know or guess. The hub answers each with a reply or with one of
BlendHub's error types, and no other client is affected.
"""

import math
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from blendhub.client import wire
from blendhub.core.layout import KVLayout, Namespace, Variant
from blendhub.core.plugin_choice import PluginChoice
from blendhub.core.spans import Span
from blendhub.system.processes import ProcessId

Message = msgspec.Struct
Request = tuple[Message, list[bytes]]

IDS = (0, 1, 2**31, 2**53 + 1, 2**62, 2**63 - 1)
POSITIONS = (0, 1, 31, 32, 33, 64, 255, 256, 257, 4095, 4096, 4097, 2**16, 2**32, 2**40)
LENGTHS = (0, 1, 2, 31, 32, 33, 64, 100, 256, 1000, 5000, 40_000)
SECONDS = (0.0, 1e-9, 0.001, math.nan, math.inf, -1.0, 3600.0)
TEXTS = ("", "e", "good", "x" * 1024, "\0", "../..", "\U0001f41f")
LAYOUTS = (
    KVLayout(layers=1, kv_heads=1, key_dim=1, value_dim=0, dtype="int8", chunk_tokens=1),
    KVLayout(layers=2, kv_heads=1, key_dim=4, value_dim=4, dtype="float16", chunk_tokens=32),
    KVLayout(layers=2, kv_heads=1, key_dim=4, value_dim=4, dtype="float16", chunk_tokens=2048),
    KVLayout(layers=2**20, kv_heads=2**20, key_dim=2**20, value_dim=2**20, dtype="float32", chunk_tokens=2**16),
)
MATCHERS = (
    (PluginChoice("prefix"),),
    (PluginChoice("rolling_hash", {"min_match_tokens": 1, "max_candidates": 1024}),),
    (PluginChoice("separator", {"min_match_tokens": 1}), PluginChoice("prefix")),
    (PluginChoice("nothing of this name"),),
    (PluginChoice("prefix", {"no": "such option"}),),
)


class Hostile:
    """A client's registrations, and the messages that it sends."""

    def __init__(self, chance: random.Random, epoch: int, learned: list[int]) -> None:
        """``learned`` are ids of other clients."""
        self.chance = chance
        self.learned = learned
        self.sessions: list[int] = []
        self.leases: list[int] = []
        self.runs: list[int] = []
        self._epoch = epoch
        self._names = 0
        self._granted: dict[int, tuple[int, int]] = {}
        """The session of each write lease, and how far that session may commit."""
        self._shard_bytes: dict[int, int] = {}
        """The bytes of a shard, by session."""
        self._begun: deque[Request] = deque()
        """The next messages."""
        self._makers: list[tuple[int, Callable[[], Request]]] = [
            (6, self._register),
            (40, self._lookup),
            (20, self._reserve),
            (15, self._commit),
            (5, self._abort),
            (5, self._release),
            (5, self._fetch),
            (5, self._put),
            (5, self._ping),
            (3, self._mapped),
            (2, self._clear),
            (2, self._audited),
            (1, self._unregister),
            (2, lambda: (wire.Stats(), [])),
        ]

    def next(self) -> Request:
        if self._begun:
            return self._begun.popleft()
        weights = [weight for weight, _ in self._makers]
        (maker,) = self.chance.choices([maker for _, maker in self._makers], weights)
        return maker() if self.sessions else self._register()

    def note(self, asked: Any, reply: Any) -> None:
        """Remember what the reply to a message names."""
        if isinstance(reply, wire.Registered):
            self.sessions = [*self.sessions[-3:], reply.session]
            self._epoch = reply.epoch
            self._shard_bytes[reply.session] = asked.namespace.shard_bytes
        lease, run = getattr(reply, "lease", None), getattr(reply, "run", None)
        self.leases = [*self.leases[-30:], *([lease] if lease is not None else [])]
        self.runs = [*self.runs[-30:], *([run] if run is not None else [])]
        if isinstance(reply, wire.Reserved) and lease is not None:
            slots = reply.slots[: self.chance.choice((1, 4))]
            self._granted[lease] = asked.session, slots[-1].span.end
            ids, shard = {"session": asked.session, "epoch": self._epoch}, bytes(self._shard_bytes[asked.session])
            self._begun.extend((wire.Put(**ids, lease=lease, position=slot.span.start), [shard]) for slot in slots)
            if self.chance.random() < 0.5:
                self._begun.append((wire.Commit(**ids, lease=lease, upto=slots[-1].span.end), []))

    def forget_sessions(self) -> None:
        """The hub knows none of them any more."""
        self.sessions.clear()

    # What messages are made of.

    def _id(self, own: list[int]) -> int:
        kind = self.chance.random()
        if own and kind < 0.7:
            return self.chance.choice(own)
        if self.learned and kind < 0.85:
            return self.chance.choice(self.learned)
        return self.chance.choice(IDS)

    def _ids(self) -> dict[str, Any]:
        epoch = self._epoch if self.chance.random() < 0.98 else self.chance.choice(IDS)
        return {"session": self._id(self.sessions), "epoch": epoch}

    def _position(self) -> int:
        return self.chance.choice(POSITIONS) + self.chance.randrange(3) * self.chance.randrange(40)

    def _span(self) -> Span:
        start, end = sorted((self._position(), self._position()))
        return Span(start, end) if self.chance.random() < 0.9 else Span(end, end)

    def _variant(self) -> Variant:
        return (
            Variant(self.chance.choice(TEXTS), self.chance.choice(TEXTS)) if self.chance.random() < 0.3 else Variant()
        )

    def _tokens(self, least: int = 0) -> list[bytes]:
        length = max(least, self.chance.choice(LENGTHS)) + self.chance.randrange(3)
        kind = self.chance.random()
        if kind < 0.03:
            return [b"abc"] if kind < 0.01 else [] if kind < 0.02 else [bytes(8), bytes(8)]
        # Few different texts, and many that repeat a single token.
        if kind < 0.3:
            return [np.full(length, self.chance.randrange(3), np.uint32).tobytes()]
        seed = self.chance.randrange(6)
        return [np.random.default_rng(seed).integers(0, 2**32, length, dtype=np.uint32).tobytes()]

    def _register(self) -> Request:
        self._names += 1
        message = wire.Register(
            engine=self.chance.choice([*TEXTS, f"hostile-{self._names}", "hostile"]),
            rank=self.chance.choice((-1, -1, 0, 0, 0, 1, 1023)),
            process=self.chance.choice((ProcessId.mine(), ProcessId.mine(), ProcessId("elsewhere", 1, 1))),
            namespace=Namespace(
                model="hostile",
                layout=self.chance.choice((*LAYOUTS[:3], *LAYOUTS)),
                world_size=self.chance.choice((1, 1, 1, 2, 1024)),
                matchers=self.chance.choice((*MATCHERS[:3], *MATCHERS)),
                cache_salt=self.chance.choice(("", "", "", "x")),
            ),
            client=self._id([]),
        )
        return message, []

    def _lookup(self) -> Request:
        message = wire.Lookup(
            **self._ids(),
            variant=self._variant(),
            acquire=self.chance.random() < 0.5,
            skip_prefix_n_tokens=self._position() if self.chance.random() < 0.3 else 0,
            wait_s=self.chance.choice(SECONDS[:-1]),
            settled=self.chance.choice((None, 0.0, 0.5)),
        )
        return message, self._tokens()

    def _reserve(self) -> Request:
        span = Span(0, self.chance.choice(LENGTHS)) if self.chance.random() < 0.6 else self._span()
        message = wire.Reserve(
            **self._ids(),
            variant=self._variant(),
            span=span,
            generation=self.chance.choice((0, 0, 0, 1, 4)),
            blended=self.chance.random() < 0.2,
            ratio=self.chance.choice((0.0, 0.15, 1.0)),
            run=self._id(self.runs) if self.chance.random() < 0.5 else None,
        )
        return message, self._tokens(min(span.end, 50_000))

    def _commit(self) -> Request:
        lease, ids = self._id(self.leases), self._ids()
        if lease in self._granted and self.chance.random() < 0.6:
            ids["session"], upto = self._granted[lease]
        else:
            upto = self._position()
        return wire.Commit(**ids, lease=lease, upto=upto), []

    def _abort(self) -> Request:
        return wire.Abort(**self._ids(), lease=self._id(self.leases)), []

    def _release(self) -> Request:
        return wire.Release(**self._ids(), lease=self._id(self.leases)), []

    def _fetch(self) -> Request:
        return wire.Fetch(
            **self._ids(), lease=self._id(self.leases), slots=(0,) * self.chance.choice((0, 1, 2, 4096))
        ), []

    def _put(self) -> Request:
        shard = bytes(self.chance.choice((0, 1, 1024, 65_536)))
        message = wire.Put(**self._ids(), lease=self._id(self.leases), position=self._position())
        return message, [shard] * self.chance.choice((0, 1, 1, 2))

    def _ping(self) -> Request:
        acknowledged = tuple(self._id(self.leases) for _ in range(self.chance.choice((0, 1, 30, 3000))))
        return wire.Ping(**self._ids(), acknowledged=acknowledged), []

    def _mapped(self) -> Request:
        return wire.Mapped(
            **self._ids(), nonce=self.chance.choice(TEXTS[:3]), mapping=2**51 + self.chance.choice(IDS[:4])
        ), []

    def _audited(self) -> Request:
        agreed, disagreed = (self.chance.choice((0, 1, 4096, 4097, 2**62)) for _ in range(2))
        return wire.Audited(**self._ids(), agreed=agreed, disagreed=disagreed), []

    def _clear(self) -> Request:
        return wire.Clear(**self._ids(), variant=self.chance.choice((None, self._variant()))), []

    def _unregister(self) -> Request:
        return wire.Unregister(**self._ids()), []
