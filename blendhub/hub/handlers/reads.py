"""Answers the requests that find and read stored KV."""

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from msgspec.structs import replace

from blendhub.client import wire
from blendhub.contracts.transport import Buffer
from blendhub.core.spans import Span
from blendhub.hub.handlers.base import DONE, Answer, Handler, Handlers
from blendhub.hub.index.matched_tokens import MatchedTokens
from blendhub.hub.index.namespace_index import Chunk, ChunkMatch, NamespaceIndex, spans_of, whole_matches
from blendhub.hub.leases.read_leases import ReadLease
from blendhub.hub.leases.sessions import Session
from blendhub.outcome.fates import fate_of

NOTHING = wire.Found()


class Cut(NamedTuple):
    """What was found of a prompt, cut at the borders of chunks."""

    kv: list[ChunkMatch]
    states: list[ChunkMatch]
    """The states of recurrent layers, each of a whole prefix."""
    start: int
    """The engine has the tokens before."""

    def in_arena(self) -> "Cut":
        kv, states = ([one for one in found if one.chunk.offset is not None] for found in (self.kv, self.states))
        return Cut(kv, states, self.start)

    @property
    def wanted(self) -> list[ChunkMatch]:
        """All KV, and behind it the last state up to which exact KV has no gap."""
        end = self.start
        for found in self.kv:
            if found.start > end or not found.match.exact:
                break
            end = found.end
        return self.kv + [found for found in self.states if found.end <= end][-1:]


class Matched(NamedTuple):
    """The matches of a prompt."""

    of_kv: NamespaceIndex
    of_states: NamespaceIndex | None
    tokens: MatchedTokens
    states: MatchedTokens | None = None

    def cut(self, skip_prefix: int) -> Cut:
        """The chunks of the matches after ``skip_prefix``, as of now."""
        kv, states = self.of_kv.cut_at_chunks(self.tokens.matches, skip_prefix), list[ChunkMatch]()
        if self.of_states and self.states:
            states = self.of_states.cut_at_chunks(self.states.matches, skip_prefix)
        return Cut(kv, states, skip_prefix)


class ReadHandlers(Handlers):
    def by_type(self) -> Mapping[type, Handler]:
        return {
            wire.Lookup: self._look,
            wire.Release: self._release,
        }

    def _look(self, session: Session, message: wire.Lookup, payload: Sequence[Buffer]) -> Answer | Awaitable[Answer]:
        tokens = self.read_tokens(payload)
        index = self.state.find_index(session, message.variant)
        if index is None:
            return NOTHING
        asked = [index.queue.ask(partial(index.match, tokens, message.settled, message.max_generation), len(tokens))]
        states = None
        if session.engine.namespace.state_layouts:
            states = self.state.find_index(session, replace(message.variant, states=True))
        if states:
            # An engine computes the last token: it cannot begin behind the state of the whole prompt.
            asked.append(states.queue.ask(partial(states.match, tokens[:-1]), len(tokens)))
        done = [one for one in asked if not isinstance(one, asyncio.Future)]
        if len(done) < len(asked):
            return self._look_later(session, message, index, states, asked)
        return self._answer(session, message, Matched(index, states, *done))

    async def _look_later(
        self,
        session: Session,
        message: wire.Lookup,
        index: NamespaceIndex,
        states: NamespaceIndex | None,
        asked: "Sequence[MatchedTokens | asyncio.Future[MatchedTokens]]",
    ) -> Answer:
        matched = [await one if isinstance(one, asyncio.Future) else one for one in asked]
        self.check_session(message)
        answer = self._answer(session, message, Matched(index, states, *matched))
        return await answer if isinstance(answer, Awaitable) else answer

    def _answer(self, session: Session, message: wire.Lookup, matched: "Matched") -> Answer | Awaitable[Answer]:
        cut = matched.cut(message.skip_prefix_n_tokens)
        if message.wait_s and self.tier:
            in_store_only = {found.chunk for found in cut.wanted if found.chunk.offset is None}
            if in_store_only:
                in_arena = {found.chunk for found in cut.wanted} - in_store_only
                return self._load_then_answer(session, message, matched, in_arena, in_store_only)
        return self._found(session, message, cut, matched.tokens.too_old)

    async def _load_then_answer(
        self,
        session: Session,
        message: wire.Lookup,
        matched: "Matched",
        in_arena: set[Chunk],
        in_store_only: set[Chunk],
    ) -> Answer:
        # Pinned, so that loading chunks does not evict other chunks of the same answer.
        for chunk in in_arena:
            self.state.cache.pin(chunk)
        try:
            await asyncio.wait(self._load(in_store_only), timeout=message.wait_s)
        finally:
            for chunk in in_arena:
                self.state.cache.unpin(chunk)
        self.check_session(message)
        # Cut again: chunks may have been dropped meanwhile.
        return self._found(session, message, matched.cut(message.skip_prefix_n_tokens), matched.tokens.too_old)

    def _found(self, session: Session, message: wire.Lookup, cut: "Cut", too_old: list[Span]) -> Answer:
        """The reply to a lookup, with a lease if requested; chunks that are only in the store are fetched."""
        self._count(cut.kv)
        self.counters.totals["tokens_too_old"] += sum(map(len, too_old))
        in_arena = cut.in_arena()
        missing = [found for found in cut.wanted if found.chunk.offset is None]
        lease = self._grant(session, in_arena.wanted) if message.acquire else None
        pieces = lease.pieces if lease else ()
        self._load({found.chunk for found in missing})
        return wire.Found(
            matches=tuple(whole_matches(in_arena.kv)),
            lease=lease.id if lease else None,
            expires_s=self.config.read_lease_s if lease else 0.0,
            pieces=pieces[: len(in_arena.kv)],
            state=next(iter(pieces[len(in_arena.kv) :]), None),
            on_the_way=spans_of(missing),
            too_old=tuple(too_old[: wire.MOST_MATCHES]),
        )

    def _count(self, chunk_matches: list[ChunkMatch]) -> None:
        for found in chunk_matches:
            self.counters.totals[f"tokens_{fate_of(found.match)}"] += found.end - found.start

    def _grant(self, session: Session, ready: list[ChunkMatch]) -> ReadLease | None:
        lease = self.state.acquire(session, ready, self.clock() + self.config.read_lease_s)
        if lease and self.tier:
            self.tier.writer.reused(lease.chunks)
        return lease

    def _release(self, session: Session, message: wire.Release, payload: Sequence[Buffer]) -> Answer:
        self.state.release(session, message.lease)
        return DONE

    def _load(self, chunks: set[Chunk]) -> list["asyncio.Future[None]"]:
        """Start to load chunks from the store; nothing to do where there is no store."""
        return [self.tier.load(chunk) for chunk in chunks] if self.tier else []
