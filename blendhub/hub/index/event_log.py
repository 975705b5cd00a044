"""What was stored and dropped lately, for engines that ask, and for a stream; kept only if somebody wants it."""

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from blendhub.client.kv_events import MEDIUM, BlockRemoved, Event, stored
from blendhub.core.tokens import Tokens
from blendhub.hub.limits import MOST_EVENT_TOKENS, MOST_EVENTS, MOST_EVENTS_A_REPLY

if TYPE_CHECKING:
    from blendhub.hub.index.namespace_index import Chunk, NamespaceIndex, Run

Stream = Callable[[str, Event], None]
"""Publishes an event of a model."""


class Logged(NamedTuple):
    number: int
    base: str
    """The engine's namespace."""
    event: bytes
    """Encoded: as objects, tokens would take ten times as much memory."""
    n_tokens: int


class EventLog:
    """The events of all namespaces in their order, numbered from 0. Blended KV is no news: its text is stored apart."""

    def __init__(self) -> None:
        self.stream: Stream | None = None
        self._wanted: set[str] = set()
        """The engines' namespaces that were asked for."""
        self._logged: deque[Logged] = deque()
        self._next = 0
        self._n_tokens = 0

    def since(self, number: int, base: str) -> tuple[int, bool, list[Event]]:
        """The events of an engine's namespace from a number on, as many as one reply takes.

        Also the number to go on with, and whether events before were forgotten. They are kept from the first call on.
        """
        self._wanted.add(base)
        first = self._next - len(self._logged)
        found: list[Event] = []
        for logged in islice(self._logged, max(number - first, 0), None):
            if logged.base == base:
                if len(found) == MOST_EVENTS_A_REPLY:
                    return logged.number, number < first, found
                found.append(msgspec.msgpack.decode(logged.event, type=Event))
        return self._next, number < first, found

    def stored(self, index: "NamespaceIndex", run: "Run", tokens: Tokens, chunks: Sequence["Chunk"]) -> None:
        """Chunks of a run became matchable."""
        if run.origin.blended or not self._is_wanted(index):
            return
        variant, movable = index.namespace.variant, index.finds_moved
        for chunk in chunks:
            before = next((one for one in run.chunks_between(chunk.span.start - 1, chunk.span.start, 1)), None)
            event = stored(
                _name(chunk),
                _name(before) if before and chunk.span.start else None,
                tokens[chunk.span.start : chunk.span.end],
                lora=variant.lora,
                cache_salt=variant.cache_salt,
                movable=movable,
            )
            self._add(index, event, len(chunk.span))

    def dropped(self, index: "NamespaceIndex", chunk: "Chunk") -> None:
        """A chunk is no longer matchable."""
        if not chunk.run.origin.blended and self._is_wanted(index):
            self._add(index, BlockRemoved([_name(chunk)], MEDIUM), 1)

    def _is_wanted(self, index: "NamespaceIndex") -> bool:
        return self.stream is not None or index.base in self._wanted

    def _add(self, index: "NamespaceIndex", event: Event, n_tokens: int) -> None:
        if self.stream:
            self.stream(index.namespace.model, event)
        if index.base not in self._wanted:
            return
        self._logged.append(Logged(self._next, index.base, msgspec.msgpack.encode(event), n_tokens))
        self._next += 1
        self._n_tokens += n_tokens
        while len(self._logged) > MOST_EVENTS or self._n_tokens > MOST_EVENT_TOKENS:
            self._n_tokens -= self._logged.popleft().n_tokens


def _name(chunk: "Chunk") -> int:
    """A number of 63 bits: numbers of runs are never given twice."""
    digest = hashlib.blake2b(f"{chunk.run.id}:{chunk.span.start}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
