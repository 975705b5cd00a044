"""Answers the requests that concern a session itself."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from blendhub.client import wire
from blendhub.contracts.transport import Buffer, Peer
from blendhub.core.errors import InvalidInput
from blendhub.hub.leases.sessions import ProcessWatcher, Session
from blendhub.hub.ratios import Ratios
from blendhub.hub.state import HubState

PONG = wire.Pong()
SHORTEST_PING_S = 0.01
PINGS_PER_SILENCE = 5


@dataclass(frozen=True)
class SessionHandlers:
    state: HubState
    ratios: Ratios
    silence_s: float
    clock: Callable[[], float]

    async def register(self, peer: Peer, message: wire.Register, watcher: ProcessWatcher) -> wire.Reply:
        if self.state.sessions.engine(message.engine) is None:
            # To refuse unknown matchers now, and to compile the others, which may take seconds, before the first store.
            await asyncio.to_thread(self.state.indexes.make, message.namespace)
        # Without an await in between: a process that dies after this has a session that its death ends.
        watcher.watch(message.process)
        session = self.state.join(message, peer, self.clock())
        if message.ratio is not None:
            self.ratios.remember(session.engine.base, message.ratio)
        return wire.Registered(
            session=session.id,
            epoch=self.state.sessions.epoch,
            arena=self.state.cache.arena.name,
            ping_every_s=max(self.silence_s / PINGS_PER_SILENCE, SHORTEST_PING_S),
        )

    def unregister(self, session: Session, message: wire.Unregister, payload: Sequence[Buffer]) -> wire.Reply:
        self.state.end_session(session, may_still_write=False)
        return wire.Done()

    def ping(self, session: Session, message: wire.Ping, payload: Sequence[Buffer]) -> wire.Reply:
        self.state.ping(session, message.acknowledged, message.abandoned)
        return wire.Pong(revoked=tuple(session.revoked)) if session.revoked else PONG

    def mapped(self, session: Session, message: wire.Mapped, payload: Sequence[Buffer]) -> wire.Reply:
        if message.nonce != self.state.cache.arena.name.nonce:
            raise InvalidInput("the mapped segment is not this hub's arena; map the one that Registered names")
        first, granted = self.state.attach(session, message.mapping)
        return wire.MayWrite(first=first, granted=granted)
