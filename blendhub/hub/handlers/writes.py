"""Answers the requests that store KV."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from blendhub.client import wire
from blendhub.contracts.transport import Buffer
from blendhub.core.errors import ArenaFull
from blendhub.core.spans import Span
from blendhub.hub.handlers.tokens import read_tokens
from blendhub.hub.leases.sessions import Session
from blendhub.hub.leases.write_leases import check_reservation
from blendhub.hub.state import HubState


@dataclass(frozen=True)
class WriteHandlers:
    state: HubState
    clock: Callable[[], float]

    async def reserve(self, session: Session, message: wire.Reserve, payload: Sequence[Buffer]) -> wire.Reply:
        state, provenance = self.state, message.provenance
        tokens, namespace = read_tokens(payload), session.engine.namespace.with_variant(message.variant)
        check_reservation(tokens, message.span, namespace, provenance, state.cache.arena)
        index = state.indexes.find(session.engine.base, message.variant)
        start, run = message.span.start, None
        if index is None:
            index = await asyncio.to_thread(state.indexes.make, namespace)
        else:
            named = index.runs.get(message.run) if message.run is not None else None
            examined = index.queue.ask(partial(index.examine, tokens, message.span, named, provenance), len(tokens))
            start, continues = await examined if isinstance(examined, asyncio.Future) else examined
            run = named if continues else None
        if start >= message.span.end or not index.matchers.can_find(provenance):
            return wire.Reserved(span=Span(start, start))
        now = self.clock()
        state.sessions.get(message.session, message.epoch, now)  # it may have ended meanwhile
        lease = state.reserve(session, index, tokens, Span(start, message.span.end), provenance, run, now)
        if lease is None:
            raise ArenaFull(
                f"every slot is being read or written (the arena has {state.cache.arena.describe()}); try again "
                "later, or give the hub a larger arena_gib"
            )
        return wire.Reserved(span=lease.span, run=lease.run.id, lease=lease.id, slots=lease.slots)

    def commit(self, session: Session, message: wire.Commit, payload: Sequence[Buffer]) -> wire.Reply:
        lease = self.state.writes.leases.of_engine(message.lease, session.engine.name)
        self.state.writes.commit(lease, session, message.upto)
        return wire.Done()

    def abort(self, session: Session, message: wire.Abort, payload: Sequence[Buffer]) -> wire.Reply:
        self.state.abort(session, message.lease)
        return wire.Done()
