"""Answers the requests that store KV."""

import asyncio
from collections.abc import Sequence
from functools import partial

from blendhub.client import wire
from blendhub.contracts.transport import Buffer
from blendhub.core.errors import ArenaFull
from blendhub.core.spans import Span
from blendhub.hub.handlers.base import DONE, Handlers
from blendhub.hub.index.namespace_index import Origin
from blendhub.hub.leases.sessions import Session
from blendhub.hub.leases.write_leases import check_reservation


class WriteHandlers(Handlers):
    async def reserve(self, session: Session, message: wire.Reserve, payload: Sequence[Buffer]) -> wire.Reply:
        tokens, namespace = self.read_tokens(payload), session.engine.namespace.with_variant(message.variant)
        check_reservation(tokens, message.span, namespace.slot_bytes, self.state.cache.arena)
        index = self.state.find_index(session, message.variant)
        origin = Origin(message.exact, message.movable_from, message.ratio)
        start, run = message.span.start, None
        if index is None:
            index = await asyncio.to_thread(self.state.indexes.make, namespace)
        else:
            named = index.runs.get(message.run) if message.run is not None else None
            examined = index.queue.ask(partial(index.examine, tokens, message.span, named, origin), len(tokens))
            start, continues = await examined if isinstance(examined, asyncio.Future) else examined
            run = named if continues else None
        if start >= message.span.end or not (origin.exact or origin.is_movable or index.finds_settled):
            return wire.Reserved(span=Span(start, start))
        self.check_session(message)
        lease = self.state.reserve(session, index, tokens, Span(start, message.span.end), origin, run, self.clock())
        if lease is None:
            raise ArenaFull(
                f"every slot is being read or written (the arena has {self.state.cache.arena.describe()}); try again "
                "later, or give the hub a larger arena_gib"
            )
        return wire.Reserved(span=lease.span, run=lease.run.id, lease=lease.id, slots=lease.slots)

    def commit(self, session: Session, message: wire.Commit, payload: Sequence[Buffer]) -> wire.Reply:
        lease = self.state.writes.leases.of_engine(message.lease, session.engine.name)
        self.state.writes.commit(lease, session, message.upto)
        return DONE

    def abort(self, session: Session, message: wire.Abort, payload: Sequence[Buffer]) -> wire.Reply:
        self.state.abort(session, message.lease)
        return DONE
