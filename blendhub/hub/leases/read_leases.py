"""Read leases: chunks that stay in their slots while an engine copies them."""

from collections.abc import Sequence

from blendhub.contracts import Segment
from blendhub.core.errors import InvalidInput
from blendhub.core.spans import Span
from blendhub.hub.index.namespace_index import ChunkMatch
from blendhub.hub.leases.sessions import Session
from blendhub.hub.leases.table import Lease, Leases
from blendhub.hub.memory.cache import Cache


class ReadLease(Lease):
    __slots__ = ("_chunk_matches", "chunks")

    def __init__(self, id: int, session: Session, now: float, chunk_matches: Sequence[ChunkMatch]) -> None:
        super().__init__(id, session, now)
        self._chunk_matches = chunk_matches
        self.chunks = list(dict.fromkeys(part.chunk for part in chunk_matches))

    @property
    def pieces(self) -> tuple[Segment, ...]:
        """The pieces of the arena that the lease covers."""
        return tuple(map(_piece, self._chunk_matches))


class ReadLeases:
    """The read leases that hold, and that pin their chunks."""

    def __init__(self, cache: Cache) -> None:
        self.leases: Leases[ReadLease] = Leases()
        self._cache = cache

    def grant(self, id: int, session: Session, now: float, chunk_matches: Sequence[ChunkMatch]) -> ReadLease | None:
        """A lease on chunks, which are all in the arena; None for none."""
        if not chunk_matches:
            return None
        if self.leases.get(id):
            raise InvalidInput(f"lease {id} holds already; each lookup draws another id")
        lease = ReadLease(id, session, now, chunk_matches)
        for chunk in lease.chunks:
            self._cache.pin(chunk)
            self._cache.policy.of(chunk).touch(chunk)
        self.leases.add(lease)
        return lease

    def end(self, lease: ReadLease) -> None:
        self.leases.end(lease)
        for chunk in lease.chunks:
            self._cache.unpin(chunk)


def _piece(part: ChunkMatch) -> Segment:
    chunk, at = part.chunk, part.slot_token
    # A leased chunk stays in its slot.
    assert chunk.offset is not None
    return Segment(Span(part.start, part.end), chunk.offset, at, chunk.span.start + at)
