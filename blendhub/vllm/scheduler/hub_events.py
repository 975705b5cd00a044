"""What the engine's hub stores and drops, as vLLM's KV cache events: for routers that follow the engine."""

import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent

from blendhub.client import kv_events, wire
from blendhub.client.hub_client import HubClient
from blendhub.vllm.hub_executor import HubExecutor

ASK_S = 0.2


class BlendHubBlockStored(BlockStored, tag="BlockStored"):
    """vLLM's event with one more field, which followers that do not know it skip."""

    movable: bool = False
    """Whether the text is reused behind any other text, too."""


class HubEvents:
    """Asks the hub beside the steps; no method waits for it."""

    def __init__(self, executor: HubExecutor, blends: bool) -> None:
        """``blends``: whether this engine reuses moved text."""
        self._executor = executor
        self._blends = blends
        self._asked: Future[tuple[int, wire.EventsFound]] | None = None
        self._ask_at = 0.0
        self._epoch = self._since = 0
        self._announced: set[int] = set()
        """The chunks that are stored, as far as is known."""

    def take(self) -> list[KVCacheEvent]:
        """The events since the last call."""
        taken: list[KVCacheEvent] = []
        if self._asked and self._asked.done():
            asked, self._asked = self._asked, None
            if asked.exception() is None:  # else the hub is asked again
                taken = self._events(*asked.result())
        if self._asked is None and time.monotonic() >= self._ask_at:
            self._ask_at = time.monotonic() + ASK_S
            self._asked = self._executor.run(self._ask)
        return taken

    def _ask(self, client: HubClient) -> tuple[int, wire.EventsFound]:
        """On the executor's thread."""
        epoch = client.epoch
        return epoch, client.events(self._since if epoch == self._epoch else 0)

    def _events(self, epoch: int, found: wire.EventsFound) -> list[KVCacheEvent]:
        taken: list[KVCacheEvent] = []
        if found.missed or epoch != self._epoch:
            # A chunk that is still there is announced when it is stored again: announcing too few costs least.
            taken += [_removed([number]) for number in self._announced]
            self._announced.clear()
        self._epoch, self._since = epoch, found.next
        if len(found.events):
            self._ask_at = 0.0  # there may be more
        for event in found.events:
            (number,) = event.block_hashes
            if isinstance(event, kv_events.BlockStored):
                self._announced.add(number)
                taken.append(self._stored(event))
            elif number in self._announced:
                self._announced.remove(number)
                taken.append(_removed([number]))
        return taken

    def _stored(self, event: kv_events.BlockStored) -> KVCacheEvent:
        fields: dict[str, Any] = {name: getattr(event, name) for name in event.__struct_fields__}
        fields["movable"] = event.movable and self._blends
        if event.extra_keys:
            fields["extra_keys"] = [tuple(keys) for keys in event.extra_keys]
        return BlendHubBlockStored(**_known(BlendHubBlockStored, fields))


def _removed(numbers: Sequence[int]) -> KVCacheEvent:
    return BlockRemoved(block_hashes=list(numbers), medium=kv_events.MEDIUM)


def _known(kind: type[KVCacheEvent], fields: dict[str, Any]) -> dict[str, Any]:
    """The fields that this version of vLLM has."""
    return {name: value for name, value in fields.items() if name in kind.__struct_fields__}
