"""Passes each request to its handler, and counts and times the answers."""

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias, cast, get_args

from blendhub.client import wire
from blendhub.contracts import Envelope, Service
from blendhub.contracts.transport import Buffer, Peer
from blendhub.core.errors import BlendHubError
from blendhub.hub.config import HubConfig
from blendhub.hub.counters import Counters, Latencies
from blendhub.hub.deletion import Deletion
from blendhub.hub.handlers.explain import ExplainHandlers
from blendhub.hub.handlers.reads import ReadHandlers
from blendhub.hub.handlers.sessions import SessionHandlers
from blendhub.hub.handlers.writes import WriteHandlers
from blendhub.hub.leases.sessions import ProcessWatcher, Session
from blendhub.hub.ratios import Ratios
from blendhub.hub.reports import ReportTable
from blendhub.hub.state import HubState
from blendhub.hub.stats import collect_stats
from blendhub.hub.stores.follower import Follower
from blendhub.hub.stores.store_tier import StoreTier

Handler: TypeAlias = Callable[[Session, Any, Sequence[Buffer]], wire.Reply | Awaitable[wire.Reply]]
OpenHandler: TypeAlias = Callable[[Any, Sequence[Buffer]], wire.Reply | Awaitable[wire.Reply]]
"""The handler of a request that needs no session."""

log = logging.getLogger(__name__)
KINDS = {kind: kind.__name__.lower() for kind in get_args(wire.Request)}


class HubService(Service):
    """The service of one hub. ``tick`` is to be called a few times a second."""

    def __init__(
        self,
        config: HubConfig,
        state: HubState,
        tier: StoreTier | None,
        deletion: Deletion,
        clock: Callable[[], float],
        follower: Follower | None = None,
    ) -> None:
        self.codec = wire.hub_codec()
        self.state = state
        self.counters = Counters(tier.reader.reads if tier else Latencies())
        self.ratios = Ratios()
        self.reports = ReportTable()
        self._config = config
        self.tier = tier
        self.follower = follower
        self._clock = clock
        self._watch = ProcessWatcher(state.process_died)
        self._deletion = deletion
        self._sessions = SessionHandlers(state, self.ratios, config.silence_s, clock)
        reads, writes = ReadHandlers(state, tier, self.counters, self.ratios, clock), WriteHandlers(state, clock)
        explaining = ExplainHandlers(state, self.counters, self.reports, self.ratios)
        self._handlers: dict[type, Handler] = {
            wire.Unregister: self._sessions.unregister,
            wire.Ping: self._sessions.ping,
            wire.Mapped: self._sessions.mapped,
            wire.Lookup: reads.look_up,
            wire.Release: reads.release,
            wire.Reserve: writes.reserve,
            wire.Commit: writes.commit,
            wire.Abort: writes.abort,
            wire.Clear: self.clear,
            wire.Reported: explaining.reported,
        }
        self._open_handlers: dict[type, OpenHandler] = {
            wire.Explain: explaining.explain,
            wire.Preview: explaining.preview,
            wire.Forget: self.forget,
            wire.Stats: lambda message, payload: self.stats(),
        }
        """The handlers of requests that need no session."""

    def handle(self, peer: Peer, request: Envelope) -> Envelope | Awaitable[Envelope]:
        started, message = self._clock(), cast(Any, request.message)
        kind = KINDS[type(message)]
        try:
            if isinstance(message, wire.FromSession):
                session = self.state.sessions.get(message.session, message.epoch, started)
                answer = self._handlers[type(message)](session, message, request.payload)
            elif isinstance(message, wire.Register):
                answer = self._sessions.register(peer, message, self._watch)
            else:
                answer = self._open_handlers[type(message)](message, request.payload)
        except BlendHubError as error:
            self._count_refusal(kind, error)
            raise
        # Not the other way round: testing whether an object is awaitable is slow.
        if not isinstance(answer, wire.Message):
            return self._finish_later(kind, started, answer)
        self.counters.requests[kind].add(self._clock() - started)
        return Envelope(answer)

    def gone(self, peer: Peer) -> None:
        self.state.peer_left(peer)

    def tick(self) -> None:
        self.state.end_silent(self._clock(), self._config.silence_s)

    def close(self) -> None:
        self._watch.close()

    def stats(self) -> wire.HubStats:
        return collect_stats(self.state, self.tier, self.counters, self.ratios, self._clock(), self.follower)

    async def forget(self, message: wire.Forget, payload: Sequence[Buffer] = ()) -> wire.Reply:
        """Delete what all requests with a cache salt stored."""
        await self._deletion.delete(message.salt)
        return wire.Done()

    async def clear(self, session: Session, message: wire.Clear, payload: Sequence[Buffer]) -> wire.Reply:
        """Delete what is stored in one namespace of an engine, or in all of them."""
        base, variant = session.engine.base, message.variant
        await self._deletion.clear(lambda index: index.base == base and variant in (None, index.namespace.variant))
        return wire.Done()

    async def _finish_later(self, kind: str, started: float, answer: Awaitable[wire.Reply]) -> Envelope:
        try:
            finished = await answer
        except BlendHubError as error:
            self._count_refusal(kind, error)
            raise
        self.counters.requests[kind].add(self._clock() - started)
        return Envelope(finished)

    def _count_refusal(self, kind: str, error: BlendHubError) -> None:
        self.counters.totals[f"refused_{type(error).__name__}"] += 1
        log.debug("refused a %s request: %s", kind, error)
