"""Answers requests to delete what a request, or all requests with a cache salt, stored."""

from collections.abc import Sequence

from blendhub.client import wire
from blendhub.contracts import Deleted
from blendhub.contracts.transport import Buffer
from blendhub.hub.counters import Counters
from blendhub.hub.deletion import Deletion
from blendhub.hub.handlers.base import Answer


class DeletionHandlers:
    def __init__(self, deletion: Deletion, counters: Counters) -> None:
        self._deletion = deletion
        self._counters = counters

    async def forget(self, message: wire.Forget, payload: Sequence[Buffer] = ()) -> Answer:
        gone = await self._deletion.delete(Deleted(request=message.request, salt=message.salt))
        n_tokens = sum(map(len, gone))
        self._counters.totals["tokens_deleted"] += n_tokens
        return wire.Forgotten(tokens=n_tokens, chunks=len(gone))
