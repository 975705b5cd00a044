"""Leases: the right of a session to use slots until a deadline. Callers pass the time; nothing here reads a clock."""

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Generic, TypeVar

from blendhub.core.errors import Busy, LeaseError
from blendhub.hub.leases.sessions import Session

T = TypeVar("T", bound="Lease")


class Lease:
    """The right to use named slots until a deadline. Subclasses name the slots and their use."""

    __slots__ = ("deadline", "engine", "id", "session")

    def __init__(self, id: int, session: Session, deadline: float) -> None:
        self.id = id
        self.session = session.id
        self.engine = session.engine.name
        self.deadline = deadline


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

    def __contains__(self, lease: T) -> bool:
        return lease.id in self._by_id

    def check(self, session: Session, most: int) -> None:
        """Raise Busy if a session has as many leases as it may have."""
        if self._numbers[session.id] >= most:
            raise Busy(f"this session has {most} leases, as many as it may have: end some first")

    def add(self, lease: T) -> None:
        self._by_id[lease.id] = lease
        self._by_engine.setdefault(lease.engine, {})[lease.id] = lease
        self._numbers[lease.session] += 1

    def extend(self, id: int, session: int, deadline: float) -> None:
        """Extend a lease of the session; nothing to do if it has ended."""
        lease = self._by_id.get(id)
        if lease and lease.session == session:
            # Moved to the end, where the leases are that hold longest.
            self._by_id[id] = self._by_id.pop(id)
            lease.deadline = deadline

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

    def expired(self, now: float) -> list[T]:
        # They all last equally long, so the first one that holds is followed by others that hold.
        return list(itertools.takewhile(lambda lease: lease.deadline <= now, self))

    def _found(self, id: int) -> T:
        try:
            return self._by_id[id]
        except KeyError:
            raise LeaseError(
                f"lease {id} does not hold: it ended, expired or never existed; data read under it must not be used"
            ) from None
