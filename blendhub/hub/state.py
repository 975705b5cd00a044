"""The state of a hub, and the rules by which it changes. One thread uses it, without locks; no I/O, no clock."""

import itertools
import secrets
from collections.abc import Iterable

from blendhub.client.wire import Register
from blendhub.contracts.transport import Peer
from blendhub.core.errors import InvalidInput
from blendhub.core.provenance import Provenance
from blendhub.core.spans import Span
from blendhub.core.tokens import Tokens
from blendhub.hub.index.namespace_index import Chunk, NamespaceIndex, Run
from blendhub.hub.index.table import IndexTable
from blendhub.hub.leases.read_leases import ReadLeases
from blendhub.hub.leases.sessions import Session, SessionTable
from blendhub.hub.leases.write_leases import WriteLease, WriteLeases
from blendhub.hub.memory.cache import Cache
from blendhub.hub.stores.store_tier import StoreTier
from blendhub.system.processes import ProcessId


class HubState:
    """Namespaces, cache, sessions and leases, kept consistent with each other."""

    def __init__(self, cache: Cache, indexes: IndexTable, tier: StoreTier | None) -> None:
        self.sessions = SessionTable(secrets.randbits(62))
        self.indexes = indexes
        self.cache = cache
        self.reads = ReadLeases(cache)
        self.writes = WriteLeases(cache, tier)
        self.ended_but_mapped: dict[int, Session] = {}
        """Sessions that ended, by id, whose mappings of the arena last: a process may still write through them."""
        # From anywhere, so that what a client still says of a lease of an earlier hub concerns no lease of this one.
        self._lease_ids = itertools.count(secrets.randbits(62))

    def join(self, message: Register, peer: Peer, now: float) -> Session:
        """A new session."""
        for former in [session for session in self.sessions if session.client == message.client]:
            self.end_session(former, may_still_write=False)
        for former in [session for session in self.ended_but_mapped.values() if session.client == message.client]:
            self._mapping_gone(former)
        return self.sessions.add(secrets.randbits(62), message, peer, now)

    def attach(self, session: Session, mapping: int) -> tuple[int, tuple[int, ...]]:
        """Let the session's process write; returns the id of the next lease, and the leases that it may write now.

        When one of these leases ends early, its slots wait for this process.
        """
        if session.rank < 0:
            raise InvalidInput("this session registered without a rank, so it writes no shard")
        if not self.cache.arena.is_mapped_by(mapping):
            raise InvalidInput(f"no process holds mapping {mapping} of this arena")
        session.mapping = mapping
        leases = self.writes.leases.all_of_engine(session.engine.name)
        return next(self._lease_ids), tuple(lease.id for lease in leases if not lease.is_written_by(session.rank))

    # Writing.

    def reserve(
        self,
        session: Session,
        index: NamespaceIndex,
        tokens: Tokens,
        span: Span,
        provenance: Provenance,
        run: Run | None,
        now: float,
    ) -> WriteLease | None:
        """A write lease on slots for a span that ``index`` lacks; None while the arena is full.

        The index may be new, or one that was dropped meanwhile because nothing was stored there. ``run`` is one that
        the tokens continue.
        """
        index = self.indexes.add(index)
        if (
            run is None
            or index.runs.get(run.id) is not run
            or run.end != span.start
            or run.provenance != provenance
            or run.foreign
            or run in index.growing
        ):
            run = Run(self.indexes.new_run_id(), index, span.start, provenance)
        return self.writes.reserve(next(self._lease_ids), session, now, run, tokens, span)

    def abort(self, session: Session, lease: int) -> None:
        """End a write lease. The session has stopped writing; the other ranks learn of it with their next pings."""
        self.revoke(self.writes.leases.of_engine(lease, session.engine.name), stopped=session)

    # Ending.

    def end_session(self, session: Session, *, may_still_write: bool) -> None:
        """End a session and its leases.

        ``may_still_write``: the session's process may go on writing into its slots; these are free only when no process
        has its mapping of the arena any more. If false, the process has stopped writing.
        """
        self.sessions.remove(session)
        if may_still_write and session.mapping is not None:
            self.ended_but_mapped[session.id] = session
        for read in self.reads.leases.all_of_engine(session.engine.name):
            if read.session == session.id:
                self.reads.end(read)
        for write in self.writes.leases.all_of_engine(session.engine.name):
            # It cannot be completed without this session, which took the lease, or writes a shard.
            if write.session == session.id or session.rank >= 0:
                self.revoke(write)
        if not may_still_write:
            self.writes.stop_waiting_for(session.id)

    def process_died(self, process: ProcessId) -> None:
        """End the sessions of a process. A child forked from it may still have its mapping, and write."""
        self._end_left([session for session in self.sessions if session.process == process])

    def peer_left(self, peer: Peer) -> None:
        """End the sessions of a connection that has ended. Its process may still live, and write."""
        self._end_left([session for session in self.sessions if session.peer == peer])

    def _end_left(self, sessions: Iterable[Session]) -> None:
        for session in sessions:
            self.end_session(session, may_still_write=True)
            self._check_mappings([session])

    def _check_mappings(self, ended: Iterable[Session]) -> None:
        """Free the slots that waited for processes whose mappings of the arena are gone."""
        for session in ended:
            if session.id not in self.ended_but_mapped:
                continue
            if session.mapping is None or not self.cache.arena.is_mapped_by(session.mapping):
                self._mapping_gone(session)

    def ping(self, session: Session, acknowledged: Iterable[int], abandoned: Iterable[int]) -> None:
        """Note that the session's process will not write under the ``acknowledged`` leases again, which were revoked,
        and end the ``abandoned`` leases, which it uses no more."""
        for lease in acknowledged:
            session.revoked.discard(lease)
            self.writes.stop_waiting_for(session.id, lease)
        for lease in abandoned:
            read, write = self.reads.leases.get(lease), self.writes.leases.get(lease)
            if read and read.engine == session.engine.name:
                self.reads.end(read)
            if write and write.engine == session.engine.name:
                self.revoke(write, stopped=session)

    def end_silent(self, now: float, silence: float) -> None:
        """End silent sessions, and drop the indexes of namespaces that store nothing."""
        for session in [session for session in self.sessions if session.last_heard <= now - silence]:
            self.end_session(session, may_still_write=True)
        self._check_mappings(list(self.ended_but_mapped.values()))
        # Each value of vLLM's cache_salt makes a namespace.
        self.indexes.drop_empty()

    def _mapping_gone(self, session: Session) -> None:
        """Note that no process can write for this ended session any more."""
        del self.ended_but_mapped[session.id]
        self.writes.stop_waiting_for(session.id)

    def revoke(self, lease: WriteLease, stopped: Session | None = None) -> None:
        """End a write lease; its unpublished slots stay in quarantine until no process can write into them.

        ``stopped`` is a session that asked for this, and has stopped writing.
        """
        waiting_for = set()
        for session in (*self.sessions, *self.ended_but_mapped.values()):
            may_write = session.engine.name == lease.engine and session.mapping is not None
            if may_write and session is not stopped and not lease.is_written_by(session.rank):
                session.revoked.add(lease.id)
                waiting_for.add(session.id)
        self.writes.revoke(lease, waiting_for)

    def check_integrity(self) -> None:
        """Assert that arena, indexes and leases agree, and that every byte of the arena has exactly one owner."""
        owned: list[tuple[int, int]] = []
        chunks: set[Chunk] = set()
        self.indexes.check_integrity()
        for index in self.indexes:
            chunks.update(index.chunks())
        in_arena = {chunk for chunk in chunks if chunk.offset is not None}
        # The store may drop a chunk while it is being read from there.
        away = chunks - in_arena - self.cache.filling.keys()
        assert all(chunk.in_store for chunk in away), "a chunk is neither in the arena nor in the store"
        assert len(self.cache.policy) == len(in_arena), "the eviction policy knows other chunks than the arena holds"
        assert all(chunk in self.cache.policy for chunk in in_arena)
        rounded = self.cache.arena.extents.rounded
        erased = self.cache.erased
        assert not erased & chunks and all(chunk.pins for chunk in erased), "a deleted chunk is found, or has no reader"
        owned += [(chunk.offset or 0, rounded(chunk.slot_bytes)) for chunk in in_arena | erased]
        for write in self.writes.leases:
            owned += [(offset, rounded(size)) for offset, size in write.unpublished()]
        for quarantine in self.writes.quarantined.values():
            assert quarantine.waiting_for, "slots in quarantine wait for no process"
            owned += [(offset, rounded(size)) for offset, size in quarantine.slots]
        owned += [(offset, rounded(chunk.slot_bytes)) for chunk, offset in self.cache.filling.items()]
        free = self.cache.arena.extents.free_extents()
        assert sum(size for _, size in free) == self.cache.arena.extents.free_bytes
        _check_tiled(sorted(owned + free), self.cache.arena.extents.size)
        leases = [*self.reads.leases, *self.writes.leases]
        assert all(lease.session in self.sessions for lease in leases), "a lease outlived its session"
        pins: dict[Chunk, int] = {}
        for lease in self.reads.leases:
            for chunk in lease.chunks:
                assert chunk in in_arena or chunk in erased, "a leased chunk left the arena"
                pins[chunk] = pins.get(chunk, 0) + 1
        assert all(chunk.pins >= pins.get(chunk, 0) for chunk in chunks)


def _check_tiled(extents: list[tuple[int, int]], size: int) -> None:
    at = 0
    for start, length in extents:
        assert start == at, f"bytes {at} to {start} of the arena belong to {'no owner' if start > at else 'two owners'}"
        at = start + length
    assert size - at < 64, f"the last {size - at} bytes of the arena are lost"
