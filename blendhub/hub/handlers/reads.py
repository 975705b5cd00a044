"""Answers the requests that find and read stored KV."""

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from blendhub.client import wire
from blendhub.contracts.transport import Buffer
from blendhub.core.spans import Match
from blendhub.hub.handlers.base import DONE, Answer, Handler, Handlers
from blendhub.hub.index.namespace_index import Chunk, ChunkMatch, NamespaceIndex, spans_of, whole_matches
from blendhub.hub.leases.read_leases import ReadLease
from blendhub.hub.leases.sessions import Session
from blendhub.outcome.fates import fate_of

NOTHING = wire.Found()


class Matched(NamedTuple):
    """The matches of a prompt."""

    searched: NamespaceIndex
    matches: list[Match]

    def cut(self, skip_prefix: int) -> list[ChunkMatch]:
        """The chunks of the matches after ``skip_prefix``, as of now."""
        return self.searched.cut_at_chunks(self.matches, skip_prefix)


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
        matched = index.queue.ask(partial(index.match, tokens, message.settled), len(tokens))
        if isinstance(matched, asyncio.Future):
            return self._look_later(session, message, index, matched)
        return self._answer(session, message, Matched(index, matched))

    async def _look_later(
        self, session: Session, message: wire.Lookup, index: NamespaceIndex, matched: "asyncio.Future[list[Match]]"
    ) -> Answer:
        tokens = await matched
        self.check_session(message)
        answer = self._answer(session, message, Matched(index, tokens))
        return await answer if isinstance(answer, Awaitable) else answer

    def _answer(self, session: Session, message: wire.Lookup, matched: "Matched") -> Answer | Awaitable[Answer]:
        cut = matched.cut(message.skip_prefix_n_tokens)
        if message.wait_s and self.tier:
            in_store_only = {found.chunk for found in cut if found.chunk.offset is None}
            if in_store_only:
                in_arena = {found.chunk for found in cut} - in_store_only
                return self._load_then_answer(session, message, matched, in_arena, in_store_only)
        return self._found(session, message, cut)

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
        return self._found(session, message, matched.cut(message.skip_prefix_n_tokens))

    def _found(self, session: Session, message: wire.Lookup, cut: list[ChunkMatch]) -> Answer:
        """The reply to a lookup, with a lease if requested; chunks that are only in the store are fetched."""
        self._count(cut)
        in_arena = [found for found in cut if found.chunk.offset is not None]
        missing = [found for found in cut if found.chunk.offset is None]
        lease = self._grant(session, message.lease, in_arena)
        self._load({found.chunk for found in missing})
        return wire.Found(
            matches=tuple(whole_matches(in_arena)),
            lease=lease.id if lease else None,
            pieces=lease.pieces if lease else (),
            on_the_way=spans_of(missing),
        )

    def _count(self, chunk_matches: list[ChunkMatch]) -> None:
        for found in chunk_matches:
            self.counters.totals[f"tokens_{fate_of(found.match)}"] += found.end - found.start

    def _grant(self, session: Session, id: int | None, ready: list[ChunkMatch]) -> ReadLease | None:
        lease = None if id is None else self.state.reads.grant(id, session, self.clock(), ready)
        if lease and self.tier:
            self.tier.writer.reused(lease.chunks)
        return lease

    def _release(self, session: Session, message: wire.Release, payload: Sequence[Buffer]) -> Answer:
        self.state.release(session, message.lease)
        return DONE

    def _load(self, chunks: set[Chunk]) -> list["asyncio.Future[None]"]:
        """Start to load chunks from the store; nothing to do where there is no store."""
        return [self.tier.load(chunk) for chunk in chunks] if self.tier else []
