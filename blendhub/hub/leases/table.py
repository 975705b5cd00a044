"""Leases: the right of a session to use slots until a deadline. Callers pass the time; nothing here reads a clock."""

import itertools
from collections import Counter
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

from blendhub.core.errors import Busy, LeaseError
from blendhub.hub.leases.sessions import Session

T = TypeVar("T", bound="Lease")


class Lease:
    """The right to use named slots until a deadline. Subclasses name the slots and their use."""

    __slots__ = ("cost", "deadline", "engine", "id", "peer", "session")

    def __init__(self, id: int, session: Session, deadline: float, cost: int) -> None:
        """``cost``: how much of its connection's share the lease takes; see ``Leases.check``."""
        self.cost = cost
        self.id = id
        self.session = session.id
        self.peer = session.peer
        self.engine = session.engine.name
        self.deadline = deadline


class FairShares:
    """The shares of a limit of the whole hub. A holder may have as much as is left: alone half at most, so that some is
    always left. A holder needs no count of the others.
    """

    def __init__(self) -> None:
        self.total = 0
        self._held: Counter[Hashable] = Counter()

    def held_by(self, holder: Hashable) -> int:
        return self._held[holder]

    def have_room(self, holder: Hashable, more: int, most: int) -> bool:
        """Whether a holder may have more, where all holders together may have ``most``."""
        return self._held[holder] + more <= most - self.total - more

    def take(self, holder: Hashable, more: int) -> None:
        self.total += more
        self._held[holder] += more

    def give_back(self, holder: Hashable, less: int) -> None:
        self.total -= less
        self._held[holder] -= less
        if not self._held[holder]:
            del self._held[holder]


class Leases(Generic[T]):
    """The leases that hold. A lease that has ended is not found again."""

    def __init__(self) -> None:
        self._by_id: dict[int, T] = {}
        self._by_engine: dict[str, dict[int, T]] = {}
        self._numbers: Counter[int] = Counter()
        """How many leases each session has."""
        self._costs = FairShares()
        """The sum of the leases' costs, by connection: a connection may have many sessions."""

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[T]:
        return iter(self._by_id.values())

    def __contains__(self, lease: T) -> bool:
        return lease.id in self._by_id

    def check(self, session: Session, cost: int, *, most_cost: int, most: int, unit: str) -> None:
        """Raise Busy if a session may have no more leases, or one more costs more than its connection's share."""
        number, costs = self._numbers[session.id], self._costs
        if number >= most or not costs.have_room(session.peer, cost, most_cost):
            raise Busy(
                f"this session has {number} leases, and its connection {costs.held_by(session.peer)} {unit}, and it "
                f"asks for {cost} more; a session may have {most}, and a connection no more {unit} than are left of "
                f"{most_cost}, of which all have {costs.total}: end some first"
            )

    def add(self, lease: T) -> None:
        self._by_id[lease.id] = lease
        self._by_engine.setdefault(lease.engine, {})[lease.id] = lease
        self._numbers[lease.session] += 1
        self._costs.take(lease.peer, lease.cost)

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
        self._costs.give_back(lease.peer, lease.cost)
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
