"""Which slots of the arena this process may write into.

Shared memory cannot be taken away from a process that maps it. The hub therefore gives no slot to another before the
processes that may write into it have acknowledged that its lease has ended, or are gone; and a process never writes
again under a lease that has ended. This is the process's half of that promise.
"""

import threading
from collections import Counter
from collections.abc import Collection, Iterable

import msgspec

from blendhub.core.errors import LeaseError

MAX_ENDED = 2**12
"""Ended leases that a process remembers one by one. Of older leases, it takes all for ended."""


class WriteRight(msgspec.Struct, frozen=True):
    """The right to write into the slots of one lease. It ends for good: nothing makes it valid again."""

    lease: int
    """A hub numbers write leases as it grants them."""
    epoch: int
    arena: str
    """The nonce of the arena that the slots belong to."""
    end: int
    """The position up to which this rank commits; behind it, nothing is left to write."""


class WriteRights:
    """The rights of one process, and the writes under way. May be used by several threads; never waits for the hub."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_closed = False
        self._has_session = False
        self._epoch = -1
        self._arena = ""
        self._first = 0
        self._granted_before: Collection[int] = ()
        self._writes: Counter[int] = Counter()
        self._unacknowledged: set[int] = set()
        self._ended: set[int] = set()
        """The leases of this epoch that ended, but for those before ``_remembered_from``."""
        self._remembered_from = 0

    def begin_session(self, epoch: int, arena: str, first: int, granted_before: Collection[int]) -> None:
        """Accept leases numbered from ``first`` on, and those ``granted_before`` that held when the hub was asked.

        No others: one that ended while this process had no session was not withheld from other writers for its sake.
        """
        with self._changed:
            if epoch != self._epoch:
                self._ended, self._remembered_from = set(), 0
            self._has_session, self._epoch, self._arena = True, epoch, arena
            self._first, self._granted_before = first, frozenset(granted_before)
            self._unacknowledged.clear()

    def end_session(self) -> None:
        """Refuse every right from now on; writes under way go on until they end."""
        with self._changed:
            self._has_session = False

    def close(self) -> None:
        """Refuse every right for ever."""
        with self._changed:
            self._is_closed = True

    def wait_until_idle(self, timeout: float, lease: int | None = None) -> bool:
        """Wait for the writes under way (of one lease, or all); returns whether none is left."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not (self._writes if lease is None else lease in self._writes), timeout
            )

    def begin_write(self, right: WriteRight) -> None:
        """Begin a write, which ``end_write`` must follow. Raises LeaseError if the right has ended."""
        with self._changed:
            reason = self._why_ended(right)
            if reason:
                raise LeaseError(f"nothing may be written under lease {right.lease}: {reason}; reserve anew")
            self._writes[right.lease] += 1

    def end_write(self, right: WriteRight) -> None:
        with self._changed:
            self._writes[right.lease] -= 1
            if not self._writes[right.lease]:
                del self._writes[right.lease]
                self._changed.notify_all()

    def end(self, right: WriteRight) -> None:
        """End the right: this process writes no more under it."""
        with self._changed:
            if right.epoch == self._epoch:
                self._end([right.lease])

    def revoke(self, leases: Iterable[int]) -> None:
        """Stop writing under leases that the hub has taken back; the hub waits for the acknowledgement."""
        with self._changed:
            leases = list(leases)
            self._end(leases)
            self._unacknowledged.update(leases)

    def to_acknowledge(self) -> tuple[int, ...]:
        """Revoked leases under which nothing is being written any more."""
        with self._changed:
            return tuple(lease for lease in self._unacknowledged if lease not in self._writes)

    def acknowledged(self, leases: Iterable[int]) -> None:
        with self._changed:
            self._unacknowledged.difference_update(leases)

    def _why_ended(self, right: WriteRight) -> str:
        """Why the right has ended; empty if it holds."""
        if self._is_closed:
            return "this process has left the hub"
        if not self._has_session:
            return "this process has no session with the hub"
        if right.epoch != self._epoch:
            return "it is of an earlier life of the hub"
        if right.arena != self._arena:
            return "it is for another arena than this process has mapped"
        if right.lease < self._first and right.lease not in self._granted_before:
            return "it ended before this process registered with the hub"
        if right.lease in self._ended or right.lease < self._remembered_from:
            return "it was committed to its end, aborted, or revoked by the hub"
        return ""

    def _end(self, leases: Iterable[int]) -> None:
        self._ended.update(leases)
        if len(self._ended) > 2 * MAX_ENDED:
            newest = sorted(self._ended)[-MAX_ENDED:]
            self._ended, self._remembered_from = set(newest), newest[0]
