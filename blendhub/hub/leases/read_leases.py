"""Read leases: chunks that stay in their slots while an engine copies them."""

from collections.abc import Iterable, Sequence

from blendhub.contracts import Segment
from blendhub.core.spans import Span
from blendhub.hub.index.namespace_index import ChunkMatch
from blendhub.hub.leases.sessions import Session
from blendhub.hub.leases.table import Lease, Leases
from blendhub.hub.limits import MOST_READ_LEASES
from blendhub.hub.memory.cache import Cache


class ReadLease(Lease):
    __slots__ = ("_chunk_matches", "chunks")

    def __init__(self, id: int, session: Session, deadline: float, chunk_matches: Sequence[ChunkMatch]) -> None:
        super().__init__(id, session, deadline)
        self._chunk_matches = chunk_matches
        self.chunks = list(dict.fromkeys(found.chunk for found in chunk_matches))

    @property
    def pieces(self) -> tuple[Segment, ...]:
        """The pieces of the arena that the lease covers."""
        return tuple(map(_piece, self._chunk_matches))


class ReadLeases:
    """The read leases that hold, and that pin their chunks."""

    def __init__(self, cache: Cache) -> None:
        self.leases: Leases[ReadLease] = Leases()
        self._cache = cache

    def grant(
        self, id: int, session: Session, deadline: float, chunk_matches: Sequence[ChunkMatch]
    ) -> ReadLease | None:
        """A lease on chunks, which are all in the arena; None for none. Raises Busy if the session has too many."""
        if not chunk_matches:
            return None
        self.leases.check(session, MOST_READ_LEASES)
        lease = ReadLease(id, session, deadline, chunk_matches)
        for chunk in lease.chunks:
            self._cache.pin(chunk)
            self._cache.policy.of(chunk).touch(chunk)
        self.leases.add(lease)
        return lease

    def extend(self, session: Session, leases: Iterable[int], deadline: float) -> None:
        """Extend leases of the session that hold; it copies under them, for longer than it was expected."""
        for lease in leases:
            self.leases.extend(lease, session.id, deadline)

    def end(self, lease: ReadLease) -> None:
        self.leases.end(lease)
        for chunk in lease.chunks:
            self._cache.unpin(chunk)


def _piece(found: ChunkMatch) -> Segment:
    chunk, at = found.chunk, found.slot_token
    # A leased chunk stays in its slot.
    assert chunk.offset is not None
    return Segment(Span(found.start, found.end), chunk.offset, at, chunk.span.start + at)
