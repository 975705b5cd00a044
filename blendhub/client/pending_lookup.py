"""A lookup under way, and the lease that it brings."""

import contextlib
import time

from blendhub.client import wire
from blendhub.client.session import HubSession, PendingReply
from blendhub.contracts.transport import Pending
from blendhub.core.errors import BlendHubError, DeadlineExceeded


class PendingLookup(PendingReply[wire.Found]):
    """An answer that came in time is kept, and so is the error of a lookup that failed."""

    request: wire.Lookup

    def __init__(self, session: HubSession, request: wire.Lookup, pending: Pending) -> None:
        super().__init__(session, request, pending, wire.Found)
        self.sent_at = time.monotonic()
        self.found: wire.Found | None = None
        self.error: BlendHubError | None = None
        self._registration = session.registrations

    def answer(self, within: float = 0.0) -> wire.Found | None:
        """The hub's answer; None if there is none ``within`` so many seconds. Raises if the lookup failed."""
        if not self.is_over:
            try:
                if self.done(within):
                    self.found = self.result()
                else:
                    self._owner.check_up()
            except BlendHubError as error:
                self.abandon()
                self.error = error
        if self.error:
            raise self.error
        return self.found

    def result(self) -> wire.Found:
        try:
            return super().result()
        except DeadlineExceeded:
            self.abandon()
            raise

    @property
    def is_over(self) -> bool:
        return self.found is not None or self.error is not None

    @property
    def lacks_some(self) -> bool:
        """Whether the answer came before all was there that the hub has; more may be there by now."""
        return self.request.wait_s > 0 and self.found is not None and bool(self.found.on_the_way)

    @property
    def has_ended(self) -> bool:
        """Whether the lease on the matches has ended with the session that it was asked for in."""
        return self.found is not None and self._owner.registrations != self._registration

    def abandon(self) -> None:
        """Want no answer: the first ping after it, or after its deadline, ends the lease."""
        if self.request.lease is not None:
            self._owner._abandoned[self.request.lease] = self._pending

    def close(self) -> None:
        """End the lease that the answer brought, or still brings."""
        with contextlib.suppress(BlendHubError):
            if self.found is None and not self.done():
                self.abandon()
            elif (found := self.answer()) and found.lease is not None:
                release = wire.Release(session=self.request.session, epoch=self.request.epoch, lease=found.lease)
                self._owner._submit(wire.Done, release)
