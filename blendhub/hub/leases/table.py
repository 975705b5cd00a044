"""Leases: the right of a session to use slots for as long as the session lives."""

from collections import Counter
from collections.abc import Iterator
from typing import Generic, TypeVar

from blendhub.core.errors import Busy, LeaseError
from blendhub.hub.leases.sessions import Session

T = TypeVar("T", bound="Lease")


class Lease:
    """The right to use named slots until the lease or its session ends. Subclasses name the slots and their use."""

    __slots__ = ("engine", "granted_at", "id", "session")

    def __init__(self, id: int, session: Session, now: float) -> None:
        self.id = id
        self.session = session.id
        self.engine = session.engine.name
        self.granted_at = now


class Leases(Generic[T]):
    """The leases that hold. A lease that has ended is not found again."""

    def __init__(self) -> None:
        self._by_id: dict[int, T] = {}
        self._by_engine: dict[str, dict[int, T]] = {}
        self._numbers: Counter[int] = Counter()
        """How many leases each session has."""

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[T]:
        return iter(self._by_id.values())

    def __contains__(self, id: int) -> bool:
        return id in self._by_id

    def check(self, session: Session, most: int) -> None:
        """Raise Busy if a session has as many leases as it may have."""
        if self._numbers[session.id] >= most:
            raise Busy(f"this session has {most} leases, as many as it may have: end some first")

    def add(self, lease: T) -> None:
        self._by_id[lease.id] = lease
        self._by_engine.setdefault(lease.engine, {})[lease.id] = lease
        self._numbers[lease.session] += 1

    def of_engine(self, id: int, engine: str) -> T:
        """The lease, if a session of that engine holds it."""
        lease = self._found(id)
        if lease.engine != engine:
            raise LeaseError(f"lease {id} belongs to another engine")
        return lease

    def end(self, lease: T) -> None:
        del self._by_id[lease.id]
        of_engine = self._by_engine[lease.engine]
        del of_engine[lease.id]
        if not of_engine:
            del self._by_engine[lease.engine]
        self._numbers[lease.session] -= 1
        if not self._numbers[lease.session]:
            del self._numbers[lease.session]

    def all_of_engine(self, engine: str) -> list[T]:
        return list(self._by_engine.get(engine, {}).values())

    def of_session(self, id: int, session: Session) -> T | None:
        """The lease, if the session holds it."""
        lease = self._by_id.get(id)
        return lease if lease and lease.session == session.id else None

    def oldest_age(self, now: float) -> float:
        """How long the oldest lease has held; 0 without leases."""
        oldest = next(iter(self), None)
        return now - oldest.granted_at if oldest else 0.0

    def _found(self, id: int) -> T:
        try:
            return self._by_id[id]
        except KeyError:
            raise LeaseError(
                f"lease {id} does not hold: it or its session has ended; data read under it must not be used"
            ) from None
