"""Write leases: slots that engines fill. Chunks are published when all ranks have committed them; a slot is not
reused while any process may still write into it."""

from typing import NamedTuple

from blendhub.client.arena_view import SHM, SHM_ADVICE
from blendhub.client.wire import Slot
from blendhub.core.errors import ArenaFull, InvalidInput
from blendhub.core.layout import Namespace
from blendhub.core.provenance import Provenance
from blendhub.core.spans import Span
from blendhub.core.tokens import Tokens, as_tokens
from blendhub.hub.index.namespace_index import Run
from blendhub.hub.leases.sessions import Session
from blendhub.hub.leases.table import Lease, Leases
from blendhub.hub.limits import MAX_CHUNKS, MAX_SLOTS
from blendhub.hub.memory.arena import Arena
from blendhub.hub.memory.cache import Cache
from blendhub.hub.stores.store_tier import StoreTier


class WriteLease(Lease):
    """Slots for the next chunks of a run."""

    __slots__ = ("committed", "published", "run", "slots", "tokens")

    def __init__(
        self, id: int, session: Session, now: float, run: Run, tokens: Tokens, slots: tuple[Slot, ...]
    ) -> None:
        super().__init__(id, session, now)
        self.run = run
        self.tokens = tokens
        self.slots = slots
        ranks = range(run.index.namespace.world_size)
        self.committed = dict.fromkeys(ranks, self.span.start)
        """The position up to which each rank has committed, after which it writes only behind that."""
        self.published = 0
        """The number of the lease's slots that have become chunks."""

    @property
    def span(self) -> Span:
        return Span(self.slots[0].span.start, self.slots[-1].span.end)

    def unpublished(self) -> list[tuple[int, int]]:
        """The offsets and sizes of the slots that have not become chunks."""
        size_of, provenance = self.run.index.namespace.slot_bytes_of, self.run.provenance
        return [(slot.slot, size_of(provenance, slot.span.end)) for slot in self.slots[self.published :]]

    def is_written_by(self, rank: int) -> bool:
        """Whether the rank has committed the whole lease, after which it does not write."""
        return self.committed[rank] == self.span.end


class Quarantine(NamedTuple):
    """Slots of a revoked lease, unusable until none of the writers in ``waiting_for`` can write into them.

    The hub cannot take shared memory away from a process that maps it.
    """

    slots: list[tuple[int, int]]
    """Their offsets and sizes."""
    waiting_for: set[int]


class WriteLeases:
    """The write leases that hold, and the slots of those that were revoked."""

    def __init__(self, cache: Cache, tier: StoreTier | None) -> None:
        self.leases: Leases[WriteLease] = Leases()
        self.quarantined: dict[int, Quarantine] = {}
        self._cache = cache
        self._tier = tier

    def reserve(self, id: int, session: Session, now: float, run: Run, tokens: Tokens, span: Span) -> WriteLease | None:
        """A lease on slots for the span, or for as much of its beginning as fits; None if not even one slot is free.

        It ends early, too, where it has as many slots, or has evicted as many chunks, as one message may. For a
        segment, which is of use only whole, there is no such lease.
        """
        namespace = run.index.namespace
        slots: list[Slot] = []
        evictions = self._cache.evictions
        size = namespace.chunk_tokens
        reached = min(span.end, (span.start // size + MAX_SLOTS) * size)
        for chunk in namespace.chunks_of(Span(span.start, reached)):
            offset = self._cache.allocate(namespace.slot_bytes_of(run.provenance, chunk.end))
            if offset is None:
                break
            slots.append(Slot(chunk, offset))
            if self._cache.evictions - evictions >= MAX_CHUNKS:
                break
        if not slots:
            return None
        if run.provenance.map and slots[-1].span.end < span.end:
            # Before the last chunk, all slots are of one size.
            for slot in slots:
                self._cache.arena.extents.free(slot.slot, namespace.slot_bytes)
            return None
        kept = tokens[: slots[-1].span.end]
        if 2 * len(kept) < len(tokens):
            # A view would keep all the tokens that the message brought.
            kept = as_tokens(kept.copy())
        lease = WriteLease(id, session, now, run, kept, tuple(slots))
        self.leases.add(lease)
        run.index.growing.add(run)
        return lease

    def commit(self, lease: WriteLease, session: Session, upto: int) -> None:
        """A rank has written up to a position. The chunks that all ranks have written are published."""
        done = lease.committed.get(session.rank)
        if done is None:
            raise InvalidInput(f"rank {session.rank} has no shard to commit; the ranks are {list(lease.committed)}")
        if not done <= upto <= lease.span.end:
            raise InvalidInput(f"rank {session.rank} has committed up to {done} of {lease.span}, not back to {upto}")
        if session.mapping is None:
            # What its slots hold is what was stored there before: perhaps KV of another namespace.
            raise InvalidInput(f"rank {session.rank} has not mapped the arena, so it has written nothing to commit")
        lease.committed[session.rank] = upto
        self._publish(lease)

    def revoke(self, lease: WriteLease, waiting_for: set[int]) -> None:
        """End a lease. Published chunks stay; other slots are freed once none of ``waiting_for`` can write there."""
        self._end(lease)
        # The store may have all tokens of the lease, so the run must not grow with others.
        lease.run.end = max(lease.run.end, lease.span.end)
        self.quarantined[lease.id] = Quarantine(lease.unpublished(), waiting_for)
        self._free_quarantined(lease.id)

    def stop_waiting_for(self, writer: int, lease: int | None = None) -> None:
        """Note that the writer will not write again under a revoked lease; ``lease`` None: under any revoked lease."""
        for id in list(self.quarantined) if lease is None else [lease]:
            quarantine = self.quarantined.get(id)
            if quarantine:
                quarantine.waiting_for.discard(writer)
                self._free_quarantined(id)

    def _end(self, lease: WriteLease) -> None:
        self.leases.end(lease)
        lease.run.index.growing.remove(lease.run)

    def _publish(self, lease: WriteLease) -> None:
        """Publish the chunks that are complete; ends the lease with the last one."""
        reached = min(lease.committed.values())
        ready = [slot for slot in lease.slots[lease.published :] if slot.span.end <= reached]
        if not ready:
            return
        chunks = lease.run.index.publish(lease.run, lease.tokens, [slot.span for slot in ready])
        lease.published += len(ready)
        for chunk, slot in zip(chunks, ready, strict=True):
            self._cache.insert(chunk, slot.slot)
        if self._tier:
            self._tier.writer.offer(lease.run, lease.tokens, chunks)
        if lease.published == len(lease.slots):
            self._end(lease)

    def _free_quarantined(self, id: int) -> None:
        quarantine = self.quarantined[id]
        if quarantine.waiting_for:
            return
        del self.quarantined[id]
        for offset, size in quarantine.slots:
            self._cache.arena.extents.free(offset, size)


def check_reservation(tokens: Tokens, span: Span, namespace: Namespace, provenance: Provenance, arena: Arena) -> None:
    """Raise unless such KV can be stored: some of it at least, and a segment as a whole."""
    namespace.check_stored(provenance)
    if not len(span) or span.end > len(tokens):
        raise InvalidInput(f"a reservation needs a span that is not empty within {len(tokens)} tokens, got {span}")
    if provenance.map and provenance.map.span != span:
        raise InvalidInput(f"a segment is reserved whole: {provenance.map.span}, not {span}")
    what, needed = "not one chunk of this model fits", namespace.slot_bytes_of(provenance, span.end)
    if provenance.map:
        n_chunks = (span.end - 1) // namespace.chunk_tokens - span.start // namespace.chunk_tokens + 1
        if n_chunks > MAX_SLOTS:
            raise InvalidInput(f"a segment has at most {MAX_SLOTS} chunks, and {span} has {n_chunks}")
        what, needed = f"the segment of {len(span)} tokens does not fit", needed + (n_chunks - 1) * namespace.slot_bytes
    if needed > arena.progress.goal:
        raise ArenaFull(
            f"{what}: it takes {needed / 2**20:.1f} MiB, and the arena has "
            f"{arena.progress.goal / 2**20:.1f}; give the hub a larger arena_gib or the engine smaller chunks, or make "
            f"{SHM} larger: {SHM_ADVICE}"
        )
