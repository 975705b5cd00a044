"""Answers the requests that find and read stored KV."""

import asyncio
from collections.abc import Awaitable, Sequence
from functools import partial

from blendhub.client import wire
from blendhub.contracts.transport import Buffer
from blendhub.core.errors import LeaseError
from blendhub.hub.handlers.base import DONE, Handlers
from blendhub.hub.index.namespace_index import Chunk, ChunkMatch, NamespaceIndex, StoredText, spans_of, whole_matches
from blendhub.hub.leases.sessions import Session
from blendhub.outcome.fates import fate_of
from blendhub.outcome.reasons import NotReused

NOTHING = wire.Found()


class ReadHandlers(Handlers):
    def look_up(
        self, session: Session, message: wire.Lookup, payload: Sequence[Buffer]
    ) -> wire.Reply | Awaitable[wire.Reply]:
        tokens = self.read_tokens(payload)
        index = self.state.find_index(session, message.variant)
        if index is None:
            return NOTHING
        stored = index.queue.ask(partial(index.look_up, tokens, message.settled), len(tokens))
        if isinstance(stored, asyncio.Future):
            return self._look_up_later(session, message, index, stored)
        chunk_matches = index.cut_at_chunks(stored.matches, message.skip_prefix_n_tokens)
        if message.wait_s and self.tier and _in_store_only(chunk_matches):
            return self._look_up_later(session, message, index, stored)
        return self._found(session, message, chunk_matches, stored.staying)

    async def _look_up_later(
        self,
        session: Session,
        message: wire.Lookup,
        index: NamespaceIndex,
        stored: "StoredText | asyncio.Future[StoredText]",
    ) -> wire.Reply:
        """Wait for the matches, and for what only the store has of them."""
        if isinstance(stored, asyncio.Future):
            stored = await stored
            self.check_session(message)
        chunk_matches = index.cut_at_chunks(stored.matches, message.skip_prefix_n_tokens)
        missing = _in_store_only(chunk_matches)
        if message.wait_s and self.tier and missing:
            # Pinned, so that loading chunks does not evict other chunks of the same answer.
            in_arena = {part.chunk for part in chunk_matches} - missing
            for chunk in in_arena:
                self.state.cache.pin(chunk)
            try:
                await asyncio.wait(self._load(missing), timeout=message.wait_s)
            finally:
                for chunk in in_arena:
                    self.state.cache.unpin(chunk)
            self.check_session(message)
            # Cut again: chunks may have been dropped meanwhile.
            chunk_matches = index.cut_at_chunks(stored.matches, message.skip_prefix_n_tokens)
        return self._found(session, message, chunk_matches, stored.staying)

    def _found(
        self, session: Session, message: wire.Lookup, chunk_matches: list[ChunkMatch], staying: Sequence[NotReused]
    ) -> wire.Reply:
        """The reply to a lookup, with a lease if requested; chunks that are only in the store are fetched."""
        if chunk_matches:
            self.counters.totals["lookups_that_found"] += 1
        for part in chunk_matches:
            self.counters.totals[f"tokens_{fate_of(part.match)}"] += part.end - part.start
        in_arena = [part for part in chunk_matches if part.chunk.offset is not None]
        missing = [part for part in chunk_matches if part.chunk.offset is None]
        lease = None
        if message.lease is not None:
            lease = self.state.reads.grant(message.lease, session, self.clock(), in_arena)
        if lease and self.tier:
            self.tier.writer.reused(lease.chunks)
        self._load({part.chunk for part in missing})
        return wire.Found(
            matches=tuple(whole_matches(in_arena)),
            lease=lease.id if lease else None,
            pieces=lease.pieces if lease else (),
            on_the_way=spans_of(missing),
            staying=tuple(staying[: wire.MOST_MATCHES]),
        )

    def release(self, session: Session, message: wire.Release, payload: Sequence[Buffer]) -> wire.Reply:
        lease = self.state.reads.leases.of_engine(message.lease, session.engine.name)
        was_deleted = not self.state.cache.erased.isdisjoint(lease.chunks)
        self.state.reads.end(lease)
        if was_deleted:
            raise LeaseError(f"what was read under lease {lease.id} was deleted meanwhile, so it must not be used")
        return DONE

    def _load(self, chunks: set[Chunk]) -> list["asyncio.Future[None]"]:
        """Start to load chunks from the store; nothing to do where there is no store."""
        return [self.tier.reader.begin(chunk) for chunk in chunks] if self.tier else []


def _in_store_only(chunk_matches: Sequence[ChunkMatch]) -> set[Chunk]:
    return {part.chunk for part in chunk_matches if part.chunk.offset is None}
