"""Answers the requests that find and read stored KV."""

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from functools import partial

from blendhub.client import wire
from blendhub.contracts import Envelope
from blendhub.contracts.transport import Buffer
from blendhub.core.errors import InvalidInput
from blendhub.core.spans import Span
from blendhub.hub.handlers.base import DONE, Answer, Handler, Handlers
from blendhub.hub.index.matched_tokens import MatchedTokens
from blendhub.hub.index.namespace_index import Chunk, ChunkMatch, NamespaceIndex, spans_of, whole_matches
from blendhub.hub.leases.read_leases import ReadLease
from blendhub.hub.leases.sessions import Session

NOTHING = wire.Found()


class ReadHandlers(Handlers):
    def by_type(self) -> Mapping[type, Handler]:
        return {
            wire.Lookup: self._look,
            wire.Release: self._release,
            wire.Fetch: self._fetch,
        }

    def _look(self, session: Session, message: wire.Lookup, payload: Sequence[Buffer]) -> Answer | Awaitable[Answer]:
        tokens = self.read_tokens(payload)
        index = self.state.find_index(session, message.variant)
        if index is None:
            return NOTHING
        matched = index.queue.ask(partial(index.match, tokens, message.settled, message.max_generation), len(tokens))
        if isinstance(matched, asyncio.Future):
            return self._look_later(session, index, message, matched)
        return self._answer(session, index, message, matched)

    async def _look_later(
        self,
        session: Session,
        index: NamespaceIndex,
        message: wire.Lookup,
        matching: "asyncio.Future[MatchedTokens]",
    ) -> Answer:
        matched = await matching
        self.check_session(message)
        answer = self._answer(session, index, message, matched)
        return await answer if isinstance(answer, Awaitable) else answer

    def _answer(
        self, session: Session, index: NamespaceIndex, message: wire.Lookup, matched: MatchedTokens
    ) -> Answer | Awaitable[Answer]:
        chunk_matches = index.cut_at_chunks(matched.matches, message.skip_prefix_n_tokens)
        if message.wait_s and self.tier:
            in_store_only = {found.chunk for found in chunk_matches if found.chunk.offset is None}
            if in_store_only:
                in_arena = {found.chunk for found in chunk_matches} - in_store_only
                return self._load_then_answer(session, index, message, matched, in_arena, in_store_only)
        return self._found(session, message, chunk_matches, matched.too_old)

    async def _load_then_answer(
        self,
        session: Session,
        index: NamespaceIndex,
        message: wire.Lookup,
        matched: MatchedTokens,
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
        chunk_matches = index.cut_at_chunks(matched.matches, message.skip_prefix_n_tokens)
        return self._found(session, message, chunk_matches, matched.too_old)

    def _found(
        self, session: Session, message: wire.Lookup, chunk_matches: list[ChunkMatch], too_old: list[Span]
    ) -> Answer:
        """The reply to a lookup, with a lease if requested; chunks that are only in the store are fetched."""
        self._count(chunk_matches)
        self.counters.totals["tokens_too_old"] += sum(map(len, too_old))
        ready = [found for found in chunk_matches if found.chunk.offset is not None]
        missing = [found for found in chunk_matches if found.chunk.offset is None]
        lease = self._grant(session, ready, message.keep_s) if message.acquire else None
        self._load({found.chunk for found in missing})
        return wire.Found(
            matches=tuple(whole_matches(ready)),
            lease=lease.id if lease else None,
            expires_s=self.config.read_lease_s if lease else 0.0,
            pieces=lease.pieces if lease else (),
            on_the_way=spans_of(missing),
            too_old=tuple(too_old[: wire.MOST_MATCHES]),
        )

    def _count(self, chunk_matches: list[ChunkMatch]) -> None:
        exact = settled = moved = 0
        for found in chunk_matches:
            if found.match.exact:
                exact += found.end - found.start
            elif found.match.settled:
                settled += found.end - found.start
            else:
                moved += found.end - found.start
        self.counters.totals["tokens_exact"] += exact
        self.counters.totals["tokens_settled"] += settled
        self.counters.totals["tokens_moved"] += moved

    def _grant(self, session: Session, ready: list[ChunkMatch], keep_s: float) -> ReadLease | None:
        lease = self.state.acquire(session, ready, self.clock() + self.config.read_lease_s)
        if lease and keep_s:
            for chunk in lease.chunks:
                self.state.cache.policy.keep(chunk, self.clock() + keep_s)
        if lease and self.tier:
            self.tier.writer.reused(lease.chunks)
        return lease

    def _release(self, session: Session, message: wire.Release, payload: Sequence[Buffer]) -> Answer:
        self.state.release(session, message.lease)
        return DONE

    def _fetch(self, session: Session, message: wire.Fetch, payload: Sequence[Buffer]) -> Answer:
        lease = self.state.reads.leases.of_engine(message.lease, session.engine.name)
        if len(message.slots) > len(lease.chunks) or not {chunk.offset for chunk in lease.chunks} >= set(message.slots):
            raise InvalidInput(f"lease {lease.id} covers {len(lease.chunks)} slots; fetch each of them once")
        return Envelope(wire.Shards(), [self.shard(session, slot) for slot in message.slots])

    def _load(self, chunks: set[Chunk]) -> list["asyncio.Future[None]"]:
        """Start to load chunks from the store; nothing to do where there is no store."""
        return [self.tier.load(chunk) for chunk in chunks] if self.tier else []
