"""Answers the requests that find and read stored KV."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from blendhub.client import wire
from blendhub.contracts.transport import Buffer
from blendhub.core.errors import LeaseError
from blendhub.hub.counters import Counters
from blendhub.hub.handlers.tokens import read_tokens
from blendhub.hub.index.finding import Finding, find
from blendhub.hub.leases.sessions import Session
from blendhub.hub.ratios import Ratios
from blendhub.hub.state import HubState
from blendhub.hub.stores.store_tier import StoreTier
from blendhub.outcome.fates import fate_of


@dataclass(frozen=True)
class ReadHandlers:
    state: HubState
    tier: StoreTier | None
    counters: Counters
    ratios: Ratios
    clock: Callable[[], float]

    def look_up(
        self, session: Session, message: wire.Lookup, payload: Sequence[Buffer]
    ) -> wire.Reply | Awaitable[wire.Reply]:
        tokens = read_tokens(payload)
        index = self.state.indexes.find(session.engine.base, message.variant)
        if index is None:
            return wire.Found(ratio=self.ratios.of(session.engine.base))
        finding = find(index, tokens, message.settled, message.skip_prefix_n_tokens)
        if isinstance(finding, Finding) and not (finding.in_store and message.wait_s):
            return self._found(session, message, finding)
        return self._look_up_later(session, message, finding)

    async def _look_up_later(
        self, session: Session, message: wire.Lookup, finding: Finding | Awaitable[Finding]
    ) -> wire.Reply:
        """Wait for the matches, and for what only the store has of them."""
        if isinstance(finding, Finding):
            finding.locate()  # the loop may have had other work before this
        else:
            finding = await finding
        if finding.in_store and message.wait_s:
            await self._load(finding, message.wait_s)
        self.state.sessions.get(message.session, message.epoch, self.clock())  # it may have ended meanwhile
        return self._found(session, message, finding)

    async def _load(self, finding: Finding, wait_s: float) -> None:
        # Pinned, so that loading chunks does not evict other chunks of the same answer.
        in_arena = {part.chunk for part in finding.leased}
        for chunk in in_arena:
            self.state.cache.pin(chunk)
        try:
            await asyncio.wait(self._begin_loads(finding), timeout=wait_s)
        finally:
            for chunk in in_arena:
                self.state.cache.unpin(chunk)
        finding.locate()

    def _begin_loads(self, finding: Finding) -> list["asyncio.Future[None]"]:
        """Start to load what only the store has."""
        chunks = {part.chunk for part in finding.in_store}
        return [self.tier.reader.begin(chunk) for chunk in chunks] if self.tier else []

    def _found(self, session: Session, message: wire.Lookup, finding: Finding) -> wire.Reply:
        """The reply to a lookup, with a lease if requested; chunks that are only in the store are fetched."""
        if finding.parts:
            self.counters.totals["lookups_that_found"] += 1
        for part in finding.parts:
            self.counters.totals[f"tokens_{fate_of(part.match)}"] += part.end - part.start
        lease, state = None, finding.state
        if message.lease is not None:
            lease = self.state.reads.grant(message.lease, session, self.clock(), finding.leased)
        if lease and self.tier:
            self.tier.writer.reused(lease.chunks)
        self._begin_loads(finding)
        return wire.Found(
            matches=finding.matches,
            lease=lease.id if lease else None,
            pieces=lease.pieces[: len(finding.in_arena)] if lease else (),
            state=state.chunk.offset if lease and state else None,
            maps=finding.maps if lease else (),
            on_the_way=finding.on_the_way,
            fetched=finding.fetched,
            staying=tuple(finding.staying[: wire.MAX_MATCHES]),
            ratio=self.ratios.of(session.engine.base),
        )

    def release(self, session: Session, message: wire.Release, payload: Sequence[Buffer]) -> wire.Reply:
        lease = self.state.reads.leases.of_engine(message.lease, session.engine.name)
        was_deleted = not self.state.cache.erased.isdisjoint(lease.chunks)
        self.state.reads.end(lease)
        if was_deleted:
            raise LeaseError(f"what was read under lease {lease.id} was deleted meanwhile, so it must not be used")
        return wire.Done()
