"""Answers the requests that find and read stored KV."""

import asyncio
from collections.abc import Awaitable, Mapping, Sequence

from blendhub import wire
from blendhub.contracts import Envelope
from blendhub.contracts.transport import Buffer
from blendhub.hub.handlers import DONE, Answer, Handler, Handlers, run_in_thread
from blendhub.hub.index import Chunk, ChunkMatch
from blendhub.hub.sessions import Session
from blendhub.plan import Match, check_tiling
from blendhub.tokens import Tokens


class ReadHandlers(Handlers):
    def by_type(self) -> Mapping[type, Handler]:
        return {
            wire.Lookup: self._lookup,
            wire.Prefetch: self._prefetch,
            wire.Acquire: self._acquire,
            wire.Release: self._release,
            wire.Fetch: self._fetch,
        }

    def _lookup(self, session: Session, message: wire.Lookup, payload: Sequence[Buffer]) -> Answer | Awaitable[Answer]:
        tokens = self.read_tokens(payload)
        if len(tokens) > self.config.match_inline_tokens:
            return self._lookup_in_thread(session, message, tokens)
        return self._answer_lookup(session, message, session.engine.index.match(tokens))

    async def _lookup_in_thread(self, session: Session, message: wire.Lookup, tokens: Tokens) -> Answer:
        matches = await run_in_thread(session.engine.index.match, tokens)
        self.check_session(message)
        answer = self._answer_lookup(session, message, matches)
        return await answer if isinstance(answer, Awaitable) else answer

    def _answer_lookup(
        self, session: Session, message: wire.Lookup, matches: list[Match]
    ) -> Answer | Awaitable[Answer]:
        chunk_matches = session.engine.index.cut_at_chunks(matches, message.skip_prefix_n_tokens)
        if message.wait_s and self.tier:
            in_store_only = {found.chunk for found in chunk_matches if found.chunk.offset is None}
            if in_store_only:
                in_arena = {found.chunk for found in chunk_matches} - in_store_only
                return self._load_then_answer(session, message, matches, in_arena, in_store_only)
        return self._grant(session, matches, chunk_matches, message.acquire)

    async def _load_then_answer(
        self,
        session: Session,
        message: wire.Lookup,
        matches: list[Match],
        in_arena: set[Chunk],
        in_store_only: set[Chunk],
    ) -> Answer:
        # Pinned, so that loading chunks does not evict other chunks of the same answer.
        for chunk in in_arena:
            chunk.pins += 1
        try:
            await asyncio.wait(self._load(in_store_only), timeout=message.wait_s)
        finally:
            for chunk in in_arena:
                chunk.pins -= 1
        self.check_session(message)
        # Cut again: chunks may have been dropped meanwhile.
        chunk_matches = session.engine.index.cut_at_chunks(matches, message.skip_prefix_n_tokens)
        return self._grant(session, matches, chunk_matches, message.acquire)

    def _grant(self, session: Session, matches: list[Match], chunk_matches: list[ChunkMatch], acquire: bool) -> Answer:
        """The reply to a lookup: a lease on what is in the arena, unless ``acquire`` is false; the rest is loaded."""
        in_store_only: set[Chunk] = set()
        exact = moved = on_the_way = 0
        for found in chunk_matches:
            length = found.end - found.start
            if found.match.exact:
                exact += length
            else:
                moved += length
            if found.chunk.offset is None:
                in_store_only.add(found.chunk)
                on_the_way += length
        self.counters.totals["tokens_exact"] += exact
        self.counters.totals["tokens_moved"] += moved
        deadline = self.clock() + self.config.read_lease_s
        lease = self.state.acquire(session, chunk_matches, deadline) if acquire else None
        self._load(in_store_only)
        return wire.Found(
            matches=tuple(matches),
            pieces=lease.pieces if lease else (),
            lease=lease.id if lease else None,
            expires_s=self.config.read_lease_s if lease else 0.0,
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
        return Envelope(wire.Bytes(), [self.shard(session, piece.slot) for piece in lease.pieces])

    def _load(self, chunks: set[Chunk]) -> list["asyncio.Task[None]"]:
        """Start to load chunks from the store; nothing to do where there is no store."""
        return [self.tier.load(chunk) for chunk in chunks] if self.tier else []
