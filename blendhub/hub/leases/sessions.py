"""Sessions: the processes of the engines, and whether they run."""

import asyncio
import os
from collections.abc import Callable, Iterator

from blendhub.client.wire import Register
from blendhub.contracts.transport import Peer
from blendhub.core.errors import InvalidInput, StaleEpoch, UnknownSession
from blendhub.core.layout import Namespace, Variant, check_same
from blendhub.system.processes import ProcessId


class EngineEntry:
    """One vLLM instance; its first registration fixed the namespace of requests without LoRA and salt."""

    def __init__(self, name: str, namespace: Namespace) -> None:
        self.name = name
        self.namespace = namespace
        self.base = namespace.digest
        self.sessions: dict[int, Session] = {}


class Session:
    """One process of an engine."""

    def __init__(self, id: int, engine: EngineEntry, request: Register, peer: Peer, now: float) -> None:
        self.id = id
        self.engine = engine
        self.client = request.client
        self.rank = request.rank
        self.process = request.process
        self.peer = peer
        self.mapping: int | None = None
        """The id of the process's mapping of the arena; None until it has reported one, and may write."""
        self.last_heard = now
        self.revoked: set[int] = set()
        """Revoked write leases that this process has not acknowledged yet."""


class SessionTable:
    """All sessions by id, and the epoch of the hub."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self._by_id: dict[int, Session] = {}
        self._engines: dict[str, EngineEntry] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, id: int) -> bool:
        return id in self._by_id

    def __iter__(self) -> Iterator[Session]:
        return iter(self._by_id.values())

    def engines(self) -> list[EngineEntry]:
        return list(self._engines.values())

    def engine(self, name: str) -> EngineEntry | None:
        return self._engines.get(name)

    def add(self, id: int, request: Register, peer: Peer, now: float) -> Session:
        name, rank, namespace = request.engine, request.rank, request.namespace
        if namespace.variant != Variant():
            raise InvalidInput(
                f"engine {name!r} registers with {namespace.variant}; an engine registers without LoRA and salt, and "
                "each of its requests names its own"
            )
        engine = self._engines.get(name) or EngineEntry(name, namespace)
        check_same(engine.namespace, namespace, f"engine {name!r}")
        if rank >= namespace.world_size:
            raise InvalidInput(f"rank {rank} of engine {name!r} is not below its world size")
        if rank >= 0 and any(session.rank == rank for session in engine.sessions.values()):
            raise InvalidInput(
                f"rank {rank} of engine {name!r} is registered already; give each engine a different name"
            )
        session = Session(id, engine, request, peer, now)
        self._engines[name] = engine
        engine.sessions[id] = session
        self._by_id[id] = session
        return session

    def get(self, id: int, epoch: int, now: float) -> Session:
        """The session of a request; notes that it was heard."""
        if epoch != self.epoch:
            raise StaleEpoch(f"epoch {epoch} belongs to an earlier hub, this one is {self.epoch}; register again")
        session = self._by_id.get(id)
        if session is None:
            raise UnknownSession(f"no session {id}: it unregistered, or was silent for too long; register again")
        session.last_heard = now
        return session

    def remove(self, session: Session) -> None:
        del self._by_id[session.id]
        del session.engine.sessions[session.id]
        if not session.engine.sessions:
            del self._engines[session.engine.name]


class ProcessWatcher:
    """Calls ``on_death`` as soon as a watched process of this machine ends."""

    def __init__(self, on_death: Callable[[ProcessId], None]) -> None:
        self._on_death = on_death
        self._fds: dict[ProcessId, int] = {}

    def watch(self, process: ProcessId) -> None:
        """Raises InvalidInput if the process should be on this machine, but does not run."""
        if not process.is_here() or process.pid == os.getpid() or process in self._fds:
            return
        try:
            fd = os.pidfd_open(process.pid)
        except OSError:
            fd = None
        if not process.is_alive():
            if fd is not None:
                os.close(fd)
            raise InvalidInput(f"process {process.pid} registers, but it does not run on this machine")
        if fd is not None:
            self._fds[process] = fd
            asyncio.get_running_loop().add_reader(fd, self._ended, process)

    def forget(self, process: ProcessId) -> None:
        fd = self._fds.pop(process, None)
        if fd is not None:
            asyncio.get_running_loop().remove_reader(fd)
            os.close(fd)

    def close(self) -> None:
        for process in list(self._fds):
            self.forget(process)

    def _ended(self, process: ProcessId) -> None:
        self.forget(process)
        self._on_death(process)
