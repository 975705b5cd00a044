"""Answers the messages of ``wire.py``. Everything here runs on the hub's event loop; what is slow leaves it."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar, get_args

import numpy as np

from blendhub import wire
from blendhub.config import HubConfig
from blendhub.contracts import Envelope, Service
from blendhub.contracts.transport import Buffer, Peer
from blendhub.errors import ArenaFull, BlendHubError, InvalidInput
from blendhub.hub.counters import Counters
from blendhub.hub.index import Chunk, ChunkMatch
from blendhub.hub.sessions import ProcessWatcher, Session
from blendhub.hub.state import HubState
from blendhub.hub.tiers import Tier
from blendhub.hub.writes import WriteLease, check_reservation
from blendhub.plan import Match, Span, check_tiling
from blendhub.tokens import Tokens, as_tokens

log = logging.getLogger(__name__)
T = TypeVar("T")
Answer: TypeAlias = wire.Reply | Envelope
Handler: TypeAlias = Callable[[Session, Any, Sequence[Buffer]], Answer | Awaitable[Answer]]
DONE = wire.Done()
PONG = wire.Pong()
SHORTEST_PING_S = 0.01
AT_ONCE = (wire.Message, Envelope)
KINDS = {kind: kind.__name__.lower() for kind in get_args(wire.Request)}
LOOKUP = KINDS[wire.Lookup]


class HubService(Service):
    """One hub. ``tick`` is to be called a few times a second."""

    def __init__(self, config: HubConfig, state: HubState, tier: Tier | None, clock: Callable[[], float]) -> None:
        self.codec = wire.hub_codec()
        self.state = state
        self.counters = Counters()
        self._config = config
        self._tier = tier
        self._clock = clock
        self._watch = ProcessWatcher(state.died)
        self._background: set[asyncio.Task[Any]] = set()
        self._handlers: dict[type, Handler] = {
            wire.Unregister: self._unregister,
            wire.Ping: self._ping,
            wire.Mapped: self._mapped,
            wire.Lookup: self._lookup,
            wire.Prefetch: self._prefetch,
            wire.Acquire: self._acquire,
            wire.Release: self._release,
            wire.Reserve: self._reserve,
            wire.Commit: self._commit,
            wire.Abort: self._abort,
            wire.Clear: self._clear,
            wire.Fetch: self._fetch,
            wire.Put: self._put,
        }

    def handle(self, peer: Peer, request: Envelope) -> Envelope | Awaitable[Envelope]:
        message: Any = request.message
        started = self._clock()
        kind = KINDS[type(message)]
        try:
            handler = self._handlers.get(type(message))
            if handler:
                session = self.state.sessions.get(message.session, message.epoch, started)
                answer = handler(session, message, request.payload)
            else:
                answer = self._register(peer, message) if isinstance(message, wire.Register) else self.numbers()
        except BlendHubError as error:
            self._refused(kind, error)
            raise
        # Not the other way round: whether something is awaitable takes long to find out.
        if isinstance(answer, AT_ONCE):
            return self._told(kind, started, answer)
        return self._finish(kind, started, answer)

    def gone(self, peer: Peer) -> None:
        for session in self.state.sessions.of_peer(peer):
            self.state.end_session(session, writes_on=True)
        self.state.check_mappings()

    def tick(self) -> None:
        self.state.expire(self._clock(), self._config.silence_s)

    def close(self) -> None:
        self._watch.close()
        for task in self._background:
            task.cancel()

    def numbers(self) -> wire.Numbers:
        state, extents, tier = self.state, self.state.cache.arena.extents, self._tier
        quarantined = state.writes.quarantined.values()
        gauges: dict[str, float] = {
            "arena_bytes": state.cache.arena.name.size,
            "arena_free_bytes": extents.free_bytes,
            "arena_quarantined_bytes": sum(len(one.offsets) * one.size for one in quarantined),
            "chunks": sum(index.n_chunks for index in state.indexes.values()),
            "chunks_in_arena": len(state.cache.policy),
            "matcher_bytes": sum(index.nbytes for index in state.indexes.values()),
            "sessions": len(state.sessions),
            "engines": state.sessions.n_engines,
            "read_leases": len(state.reads.leases),
            "write_leases": len(state.writes.leases),
            "store_bytes": tier.store.nbytes if tier else 0,
            "store_waiting_chunks": tier.waiting if tier else 0,
            **self.counters.latencies(),
        }
        counters: dict[str, float] = {
            **self.counters.totals,
            **{f"requests_{kind}": count for kind, count in self.counters.requests.items()},
            "evictions": state.cache.evictions,
            "forgotten_chunks": state.cache.forgotten,
            "store_saves": tier.saves if tier else 0,
            "store_loads": tier.loads if tier else 0,
            "store_failures": tier.failures if tier else 0,
            "store_corrupted": tier.store.corrupted if tier else 0,
        }
        indexes: dict[str, dict[str, float]] = {
            digest: {"runs": len(index.runs), "chunks": index.n_chunks, "tokens": len(index)}
            for digest, index in state.indexes.items()
        }
        return wire.Numbers(epoch=state.sessions.epoch, counters=counters, gauges=gauges, namespaces=indexes)

    async def _finish(self, kind: str, started: float, answer: Awaitable[Answer]) -> Envelope:
        try:
            finished = await answer
        except BlendHubError as error:
            self._refused(kind, error)
            raise
        return self._told(kind, started, finished)

    def _told(self, kind: str, started: float, answer: Answer) -> Envelope:
        self.counters.took(kind, self._clock() - started)
        # A prefetch or an acquire usually belongs to a lookup that was counted.
        if kind == LOOKUP and isinstance(answer, wire.Found) and answer.matches:
            self.counters.totals["lookups_that_found"] += 1
        return answer if isinstance(answer, Envelope) else Envelope(answer)

    def _refused(self, kind: str, error: BlendHubError) -> None:
        self.counters.totals[f"refused_{type(error).__name__}"] += 1
        log.debug("refused a %s: %s", kind, error)

    # SessionTable.

    async def _register(self, peer: Peer, message: wire.Register) -> Answer:
        namespace = message.namespace
        if namespace.digest not in self.state.indexes:
            # Matchers may compile for seconds.
            index = await _in_thread(self.state.make_index, namespace)
            self.state.indexes.setdefault(namespace.digest, index)
        self._watch.watch(message.process)
        session = self.state.join(message, peer, self._clock())
        return wire.Registered(
            session=session.id,
            epoch=self.state.sessions.epoch,
            arena=self.state.cache.arena.name,
            ping_every_s=max(self._config.silence_s / 5, SHORTEST_PING_S),
        )

    def _unregister(self, session: Session, message: wire.Unregister, payload: Sequence[Buffer]) -> Answer:
        self.state.end_session(session, writes_on=False)
        return DONE

    def _ping(self, session: Session, message: wire.Ping, payload: Sequence[Buffer]) -> Answer:
        self.state.acknowledge(session, message.let_go)
        return wire.Pong(revoked=tuple(session.revoked)) if session.revoked else PONG

    def _mapped(self, session: Session, message: wire.Mapped, payload: Sequence[Buffer]) -> Answer:
        if message.nonce != self.state.cache.arena.name.nonce:
            raise InvalidInput("what was mapped is not this hub's arena")
        first, granted = self.state.attach(session, message.mapping)
        return wire.MayWrite(first=first, granted=granted, longest_lease_s=self._config.write_lease_s)

    # Reading.

    def _lookup(self, session: Session, message: wire.Lookup, payload: Sequence[Buffer]) -> Answer | Awaitable[Answer]:
        tokens = self._tokens(payload)
        if len(tokens) > self._config.match_inline_tokens:
            return self._lookup_long(session, message, tokens)
        return self._found(session, message, session.engine.index.match(tokens))

    async def _lookup_long(self, session: Session, message: wire.Lookup, tokens: Tokens) -> Answer:
        matches = await _in_thread(session.engine.index.match, tokens)
        self.state.sessions.get(message.session, message.epoch, self._clock())
        answer = self._found(session, message, matches)
        return await answer if isinstance(answer, Awaitable) else answer

    def _found(self, session: Session, message: wire.Lookup, matches: list[Match]) -> Answer | Awaitable[Answer]:
        chunk_matches = session.engine.index.cut_at_chunks(matches, message.skip_prefix_n_tokens)
        if message.wait_s and self._tier:
            away = {found.chunk for found in chunk_matches if found.chunk.offset is None}
            if away:
                return self._fetch_then_grant(session, message, matches, chunk_matches, away)
        return self._grant(session, matches, chunk_matches, message.acquire)

    async def _fetch_then_grant(
        self,
        session: Session,
        message: wire.Lookup,
        matches: list[Match],
        chunk_matches: list[ChunkMatch],
        away: set[Chunk],
    ) -> Answer:
        # What is here must not be evicted to make room for what comes.
        here = {found.chunk for found in chunk_matches} - away
        for chunk in here:
            chunk.pins += 1
        try:
            await asyncio.wait(self._load(away), timeout=message.wait_s)
        finally:
            for chunk in here:
                chunk.pins -= 1
        self.state.sessions.get(message.session, message.epoch, self._clock())
        chunk_matches = session.engine.index.cut_at_chunks(matches, message.skip_prefix_n_tokens)
        return self._grant(session, matches, chunk_matches, message.acquire)

    def _grant(self, session: Session, matches: list[Match], chunk_matches: list[ChunkMatch], acquire: bool) -> Answer:
        away: set[Chunk] = set()
        exact = moved = on_the_way = 0
        for found in chunk_matches:
            length = found.end - found.start
            if found.match.exact:
                exact += length
            else:
                moved += length
            if found.chunk.offset is None:
                away.add(found.chunk)
                on_the_way += length
        self.counters.totals["tokens_exact"] += exact
        self.counters.totals["tokens_moved"] += moved
        lease = (
            self.state.acquire(session, chunk_matches, self._clock() + self._config.read_lease_s) if acquire else None
        )
        self._load(away)
        return wire.Found(
            matches=tuple(matches),
            pieces=lease.pieces if lease else (),
            lease=lease.id if lease else None,
            expires_s=self._config.read_lease_s if lease else 0.0,
            on_the_way_tokens=on_the_way,
        )

    def _prefetch(
        self, session: Session, message: wire.Prefetch, payload: Sequence[Buffer]
    ) -> Answer | Awaitable[Answer]:
        lookup = wire.Lookup(session=message.session, epoch=message.epoch, acquire=False)
        return self._lookup(session, lookup, payload)

    def _acquire(self, session: Session, message: wire.Acquire, payload: Sequence[Buffer]) -> Answer:
        matches = list(message.matches)
        check_tiling(max((match.span.end for match in matches), default=0), matches)
        chunk_matches = session.engine.index.cut_at_chunks(matches, message.skip_prefix_n_tokens)
        return self._grant(session, matches, chunk_matches, acquire=True)

    def _release(self, session: Session, message: wire.Release, payload: Sequence[Buffer]) -> Answer:
        self.state.release(session, message.lease)
        return DONE

    def _fetch(self, session: Session, message: wire.Fetch, payload: Sequence[Buffer]) -> Answer:
        lease = self.state.reads.leases.of_engine(message.lease, session.engine.name)
        return Envelope(wire.Bytes(), [self._shard(session, piece.slot) for piece in lease.pieces])

    # Writing.

    async def _reserve(self, session: Session, message: wire.Reserve, payload: Sequence[Buffer]) -> Answer:
        tokens, index = self._tokens(payload), session.engine.index
        check_reservation(tokens, message.span, index.namespace.slot_bytes, self.state.cache.arena.name.size)
        if len(tokens) > self._config.match_inline_tokens:
            start = await _in_thread(index.exact_until, tokens, message.span)
        else:
            start = index.exact_until(tokens, message.span)
        if start >= message.span.end:
            return wire.Reserved(span=Span(start, start))
        span = Span(start, message.span.end)
        until = self._clock() + self._config.wait_for_store_s
        while True:
            self.state.sessions.get(message.session, message.epoch, self._clock())
            deadline = self._clock() + self._config.write_lease_s
            lease = self.state.reserve(session, tokens, span, message.exact, message.run, deadline)
            if lease:
                return self._reserved(lease)
            left = until - self._clock()
            if left <= 0 or not self._tier or not self._tier.waiting:
                raise ArenaFull(
                    "every slot is being read, written or saved; try again later, or give the hub more memory"
                )
            await self._tier.saved_some(left)

    def _reserved(self, lease: WriteLease) -> Answer:
        expires = self._config.write_lease_s
        return wire.Reserved(
            span=lease.span,
            run=lease.run.id,
            lease=lease.id,
            number=lease.number,
            slots=lease.slots,
            expires_s=expires,
        )

    def _commit(self, session: Session, message: wire.Commit, payload: Sequence[Buffer]) -> Answer | Awaitable[Answer]:
        lease = self.state.writes.leases.of_engine(message.lease, session.engine.name)
        copies = [copy for copy, rank in lease.copies.items() if rank == session.rank]
        if copies:
            return self._commit_after(session, message, copies)
        return self._commit_now(session, message)

    async def _commit_after(
        self, session: Session, message: wire.Commit, copies: "list[asyncio.Future[None]]"
    ) -> Answer:
        await asyncio.wait(copies)
        self.state.sessions.get(message.session, message.epoch, self._clock())
        return self._commit_now(session, message)

    def _commit_now(self, session: Session, message: wire.Commit) -> Answer:
        self.state.commit(session, message.lease, message.upto)
        return DONE

    def _abort(self, session: Session, message: wire.Abort, payload: Sequence[Buffer]) -> Answer:
        self.state.abort(session, message.lease)
        return DONE

    async def _put(self, session: Session, message: wire.Put, payload: Sequence[Buffer]) -> Answer:
        lease = self.state.writes.leases.of_engine(message.lease, session.engine.name)
        target = self._shard(session, lease.unwritten(session.rank, message.position).slot)
        if len(payload) != 1 or memoryview(payload[0]).nbytes != len(target):
            sizes = [memoryview(part).nbytes for part in payload]
            raise InvalidInput(f"a shard has {len(target)} bytes, but the payloads have {sizes}")
        copying = asyncio.ensure_future(
            _in_thread(np.copyto, np.frombuffer(target, np.uint8), np.frombuffer(payload[0], np.uint8))
        )
        lease.copies[copying] = session.rank
        copying.add_done_callback(partial(self._copied, lease))
        # If the client waits no longer for the answer, the copy still goes on, and the slot is not free before it ends.
        await asyncio.shield(copying)
        return DONE

    def _copied(self, lease: WriteLease, copying: "asyncio.Future[None]") -> None:
        del lease.copies[copying]
        if not lease.copies:
            self.state.writes.stop_waiting_for(lease)

    def _clear(self, session: Session, message: wire.Clear, payload: Sequence[Buffer]) -> Answer:
        for chunk in self.state.clear(session.engine.index):
            if self._tier:
                self._tier.discard(chunk.run.key, chunk.span)
        return DONE

    # What they share.

    def _tokens(self, payload: Sequence[Buffer]) -> Tokens:
        if len(payload) != 1:
            raise InvalidInput(f"tokens come as one payload of uint32, but this request has {len(payload)} payloads")
        tokens = as_tokens(memoryview(payload[0]))
        if len(tokens) > self._config.max_prompt_tokens:
            raise InvalidInput(
                f"{len(tokens)} tokens are more than the {self._config.max_prompt_tokens} that this hub takes; "
                "raise max_prompt_tokens"
            )
        return tokens

    def _load(self, chunks: set[Chunk]) -> list["asyncio.Task[None]"]:
        return [self._tier.load(chunk) for chunk in chunks] if self._tier else []

    def _shard(self, session: Session, slot: int) -> memoryview:
        if session.rank < 0:
            raise InvalidInput("this session registered without a rank, so it has no shard of a chunk")
        size = session.engine.index.namespace.layout.shard_bytes
        return self.state.cache.arena.slot(slot + session.rank * size, size)


async def _in_thread(work: Callable[..., T], *arguments: Any) -> T:
    return await asyncio.get_running_loop().run_in_executor(None, partial(work, *arguments))
