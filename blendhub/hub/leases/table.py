"""Leases: the right of a session to use slots for as long as the session lives."""

from collections.abc import Iterator
from typing import Generic, TypeVar

from blendhub.core.errors import LeaseError
from blendhub.hub.leases.sessions import Session

T = TypeVar("T", bound="Lease")


class Lease:
    """The right to use slots until the lease is ended or its session ends. A subclass has the slots and their use."""

    __slots__ = ("engine", "granted_at", "id", "session")

    def __init__(self, id: int, session: Session, now: float) -> None:
        self.id = id
        self.session = session.id
        self.engine = session.engine.name
        self.granted_at = now


class Leases(Generic[T]):
    """The leases that hold, the oldest first. A lease that has ended is not found again."""

    def __init__(self) -> None:
        self._by_id: dict[int, T] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[T]:
        return iter(self._by_id.values())

    def get(self, id: int) -> T | None:
        return self._by_id.get(id)

    def add(self, lease: T) -> None:
        self._by_id[lease.id] = lease

    def end(self, lease: T) -> None:
        del self._by_id[lease.id]

    def of_engine(self, id: int, engine: str) -> T:
        """The lease, if a session of that engine holds it."""
        lease = self._by_id.get(id)
        if lease is None:
            raise LeaseError(
                f"lease {id} does not hold: it or its session has ended; data read under it must not be used"
            )
        if lease.engine != engine:
            raise LeaseError(f"lease {id} belongs to another engine")
        return lease

    def all_of_engine(self, engine: str) -> list[T]:
        return [lease for lease in self if lease.engine == engine]

    def oldest_age(self, now: float) -> float:
        """How long the oldest lease has held; 0 without leases."""
        oldest = next(iter(self), None)
        return now - oldest.granted_at if oldest else 0.0
