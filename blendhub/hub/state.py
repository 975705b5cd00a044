"""All that a hub knows, and the rules by which it changes. Touched by one thread, without locks; no I/O, no clock."""

import itertools
import secrets
from collections.abc import Callable, Hashable, Iterable

from blendhub.contracts.transport import Peer
from blendhub.errors import InvalidInput
from blendhub.hub.arena import Arena
from blendhub.hub.cache import Cache, slot_bytes
from blendhub.hub.eviction import EvictionPolicy
from blendhub.hub.extents import rounded
from blendhub.hub.index import Chunk, ChunkMatch, NamespaceIndex, Run, Saved
from blendhub.hub.reads import ReadLease, Reads
from blendhub.hub.sessions import Session, SessionTable
from blendhub.hub.writes import WriteLease, Writes
from blendhub.layout import Namespace
from blendhub.plan import Span
from blendhub.processes import ProcessId
from blendhub.tokens import Tokens
from blendhub.wire import Register

SaveChunk = Callable[[Chunk], None]


class HubState:
    """Namespaces, cache, sessions and leases, kept in agreement."""

    def __init__(
        self, arena: Arena, policy: EvictionPolicy[Chunk], index_of: Callable[[Namespace], NamespaceIndex]
    ) -> None:
        self.sessions = SessionTable(secrets.randbits(62))
        self.indexes: dict[str, NamespaceIndex] = {}
        self.cache = Cache(arena, policy)
        self.reads = Reads(self.cache)
        self.writes = Writes(self.cache, self._published)
        self.save: SaveChunk | None = None
        """Writes a new chunk to the store, if there is one."""
        self.ended_but_mapped: dict[int, Session] = {}
        """SessionTable that ended while a mapping of theirs lasts, through which somebody may still write."""
        self._make_index = index_of
        self._ids = itertools.count(1)

    def next_id(self) -> int:
        return next(self._ids)

    def make_index(self, namespace: Namespace) -> NamespaceIndex:
        """A namespace that is not known yet. Slow: matchers may compile. Touches no state, so any thread may."""
        return self._make_index(namespace)

    def index_for(self, namespace: Namespace) -> NamespaceIndex:
        """The namespace, made if it is new."""
        known = self.indexes.get(namespace.digest)
        return known or self.indexes.setdefault(namespace.digest, self.make_index(namespace))

    def join(self, message: Register, peer: Peer, now: float) -> Session:
        """A new session."""
        index = self.indexes[message.namespace.digest]
        for former in self.sessions.of_client(message.client):
            self.end_session(former, writes_on=False)
        for id in [id for id, former in self.ended_but_mapped.items() if former.client == message.client]:
            self._gone(id)
        return self.sessions.join(secrets.randbits(62), message, index, peer, now)

    def attach(self, session: Session, mapping: int) -> tuple[int, tuple[int, ...]]:
        """From now on the session's process may write; returns the first number of leases to come, and those that hold.

        Whenever one of these ends, its slots wait for this process.
        """
        if session.rank < 0:
            raise InvalidInput("this session registered without a rank, so it writes no shard")
        if not self.cache.arena.is_mapped_by(mapping):
            raise InvalidInput(f"no process holds mapping {mapping} of this arena")
        session.mapping = mapping
        leases = [lease for lease in self.writes.leases if lease.engine == session.engine.name]
        return self.next_id(), tuple(lease.id for lease in leases if not lease.is_written_by(session.rank))

    # Reading.

    def acquire(self, session: Session, chunk_matches: Iterable[ChunkMatch], deadline: float) -> ReadLease | None:
        return self.reads.grant(secrets.randbits(62), session, deadline, chunk_matches)

    def release(self, session: Session, lease: int) -> None:
        self.reads.end(self.reads.leases.of_session(lease, session.id))

    # Writing.

    def reserve(
        self, session: Session, tokens: Tokens, span: Span, exact: bool, run: int | None, deadline: float
    ) -> WriteLease | None:
        """Slots for a span that is not stored; None if there is no room just now."""
        index = session.engine.index
        target = index.runs.get(run) if run is not None else None
        if (
            target is None
            or target.end != span.start
            or target.exact != exact
            or self.writes.is_growing(target)
            or not target.continues(tokens)
        ):
            target = Run(self.next_id(), index, span.start, exact)
        return self.writes.reserve(secrets.randbits(62), self.next_id(), session, deadline, target, tokens, span)

    def commit(self, session: Session, lease: int, upto: int) -> None:
        self.writes.commit(self.writes.leases.of_engine(lease, session.engine.name), session, upto)

    def abort(self, session: Session, lease: int) -> None:
        """The rank that aborts has stopped writing; the others are asked to."""
        self._revoke(self.writes.leases.of_engine(lease, session.engine.name), but=session)

    # Ending.

    def end_session(self, session: Session, *, writes_on: bool) -> None:
        """Nothing that a session held outlives it; only slots that its process may still write wait for that one."""
        self.sessions.leave(session)
        if writes_on and session.mapping is not None:
            self.ended_but_mapped[session.id] = session
        for read in [lease for lease in self.reads.leases if lease.session == session.id]:
            self.reads.end(read)
        for write in [lease for lease in self.writes.leases if lease.engine == session.engine.name]:
            if write.session == session.id or session.rank >= 0:
                self._revoke(write)
        if not writes_on:
            self.writes.stop_waiting_for(session.id)

    def check_mappings(self) -> None:
        """Free what waited for processes that are gone."""
        for id, session in list(self.ended_but_mapped.items()):
            if session.mapping is None or not self.cache.arena.is_mapped_by(session.mapping):
                self._gone(id)

    def acknowledge(self, session: Session, leases: Iterable[int]) -> None:
        for lease in leases:
            session.revoked.discard(lease)
            self.writes.stop_waiting_for(session.id, lease)

    def expire(self, now: float, silence: float) -> None:
        """End what has passed its deadline."""
        for read in self.reads.leases.expired(now):
            self.reads.end(read)
        for write in self.writes.leases.expired(now):
            self._revoke(write)
        for session in self.sessions.silent_since(now - silence):
            self.end_session(session, writes_on=True)
        self.check_mappings()
        # Each value of vLLM's cache_salt makes one.
        for index in [index for index in self.indexes.values() if not index.runs and not self.sessions.uses(index)]:
            del self.indexes[index.digest]

    def died(self, process: ProcessId) -> None:
        """A child that was forked from it may have its mapping, and write."""
        for session in self.sessions.of_process(process):
            self.end_session(session, writes_on=True)
        self.check_mappings()

    def clear(self, index: NamespaceIndex) -> list[Chunk]:
        """Forget a namespace's chunks, but for those that are pinned; returns those that the store has."""
        saved = []
        for chunk in [chunk for run in index.runs.values() for chunk in run.chunks.values()]:
            if chunk.pins or chunk.saved is Saved.WAITING:
                continue
            if chunk.saved is Saved.YES:
                saved.append(chunk)
            if chunk.offset is not None:
                self.cache.remove(chunk)
            index.drop(chunk)
        return saved

    def _gone(self, ended_but_mapped: int) -> None:
        """Nobody writes for a session that has ended any more."""
        del self.ended_but_mapped[ended_but_mapped]
        self.writes.stop_waiting_for(ended_but_mapped)

    def _revoke(self, lease: WriteLease, but: Session | None = None) -> None:
        engine = self.sessions.engine(lease.engine)
        ended_but_mapped = [
            session for session in self.ended_but_mapped.values() if session.engine.name == lease.engine
        ]
        waiting: set[Hashable] = set()
        for session in [*(engine.sessions.values() if engine else ()), *ended_but_mapped]:
            if session is not but and session.mapping is not None and not lease.is_written_by(session.rank):
                session.revoked.add(lease.id)
                waiting.add(session.id)
        self.writes.revoke(lease, waiting)

    def _published(self, lease: WriteLease, chunks: list[Chunk]) -> None:
        if self.save:
            lease.run.tokens = lease.tokens
            for chunk in chunks:
                self.save(chunk)

    def check_integrity(self) -> None:
        """Arena, index, eviction order and leases agree, and every byte of the arena has exactly one owner."""
        owned: list[tuple[int, int]] = []
        chunks: set[Chunk] = set()
        for index in self.indexes.values():
            index.check_integrity()
            chunks |= {chunk for run in index.runs.values() for chunk in run.chunks.values()}
        in_arena = {chunk for chunk in chunks if chunk.offset is not None}
        # The store may drop a chunk while it is being read from there.
        away = chunks - in_arena - self.cache.filling.keys()
        assert all(chunk.saved is Saved.YES for chunk in away), "a chunk is nowhere"
        assert len(self.cache.policy) == len(in_arena), "the order of eviction holds other chunks than the arena"
        assert all(chunk in self.cache.policy for chunk in in_arena)
        owned += [(chunk.offset or 0, rounded(slot_bytes(chunk))) for chunk in in_arena]
        for write in self.writes.leases:
            size = rounded(write.run.index.namespace.slot_bytes)
            owned += [(slot.slot, size) for slot in write.slots[write.published :]]
        for quarantine in self.writes.quarantined.values():
            assert quarantine.waiting_for, "slots wait for nobody"
            owned += [(offset, rounded(quarantine.size)) for offset in quarantine.offsets]
        owned += [(offset, rounded(slot_bytes(chunk))) for chunk, offset in self.cache.filling.items()]
        free = self.cache.arena.extents.stretches()
        assert sum(size for _, size in free) == self.cache.arena.extents.free_bytes
        _check_tiled(sorted(owned + free), self.cache.arena.name.size)
        pins: dict[Chunk, int] = {}
        for lease in self.reads.leases:
            for chunk in lease.chunks:
                assert chunk in in_arena, "a leased chunk left the arena"
                pins[chunk] = pins.get(chunk, 0) + 1
        assert all(chunk.pins >= pins.get(chunk, 0) for chunk in chunks)


def _check_tiled(stretches: list[tuple[int, int]], size: int) -> None:
    at = 0
    for start, length in stretches:
        assert start == at, f"bytes {at} to {start} of the arena belong to {'nobody' if start > at else 'two'}"
        at = start + length
    assert size - at < 64, f"the last {size - at} bytes of the arena are lost"
