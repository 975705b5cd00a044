"""Read leases: chunks that stay in their slots while an engine copies them."""

from collections.abc import Iterable

from blendhub.hub.cache import Cache
from blendhub.hub.index import Chunk, ChunkMatch
from blendhub.hub.leases import Lease, Leases
from blendhub.hub.sessions import Session
from blendhub.plan import Span
from blendhub.wire import Piece


class ReadLease(Lease):
    __slots__ = ("chunks", "pieces")

    def __init__(
        self, id: int, session: Session, deadline: float, pieces: tuple[Piece, ...], chunks: list[Chunk]
    ) -> None:
        super().__init__(id, session.id, session.engine.name, deadline)
        self.pieces = pieces
        self.chunks = chunks


class Reads:
    """The read leases that hold: their chunks are pinned."""

    def __init__(self, cache: Cache) -> None:
        self.leases: Leases[ReadLease] = Leases()
        self._cache = cache

    def grant(
        self, id: int, session: Session, deadline: float, chunk_matches: Iterable[ChunkMatch]
    ) -> ReadLease | None:
        """A lease on the chunks that are in the arena; None if none is."""
        pieces: list[Piece] = []
        chunks: dict[Chunk, None] = {}
        for found in chunk_matches:
            match, chunk = found.match, found.chunk
            if chunk.offset is None:
                continue
            source = match.source_start + found.start - match.span.start
            row = source - chunk.span.start
            pieces.append(Piece(Span(found.start, found.end), match.run, source, chunk.offset, row, match.exact))
            chunks[chunk] = None
        if not pieces:
            return None
        for chunk in chunks:
            chunk.pins += 1
            self._cache.policy.touch(chunk)
        lease = ReadLease(id, session, deadline, tuple(pieces), list(chunks))
        self.leases.add(lease)
        return lease

    def end(self, lease: ReadLease) -> None:
        self.leases.end(lease)
        for chunk in lease.chunks:
            chunk.pins -= 1
