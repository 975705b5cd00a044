"""A lookup of a request, and the lease that it brings."""

import contextlib
import time

from blendhub.client.hub_client import HubClient
from blendhub.client.session import PendingReply
from blendhub.client.wire import Found
from blendhub.core.errors import BlendHubError, DeadlineExceeded


class PendingLookup:
    """Only ``answer`` waits. An answer that came in time is kept, and so is the error of a lookup that failed."""

    def __init__(self, client: HubClient, reply: PendingReply[Found], skip_prefix: int, waits_for_store: bool) -> None:
        """``skip_prefix``: so many tokens were not asked for."""
        self.skip_prefix = skip_prefix
        self.waits_for_store = waits_for_store
        self.sent_at = time.monotonic()
        self.epoch = client.epoch
        """The epoch of the hub that gives the lease."""
        self.found: Found | None = None
        self.error: BlendHubError | None = None
        self._client = client
        self._registration = client.registrations
        self._reply = reply

    def answer(self, within: float = 0.0) -> Found | None:
        """The hub's answer; None if there is none ``within`` so many seconds. Raises if the lookup failed."""
        if not self.is_over:
            try:
                if self._reply.done(within):
                    self.found = self._reply.result()
                else:
                    self._client.check_up()
            except DeadlineExceeded:
                self.error = DeadlineExceeded("the lookup took more than lookup_timeout_s")
            except BlendHubError as error:
                self._reply.abandon()
                self.error = error
        if self.error:
            raise self.error
        return self.found

    @property
    def is_over(self) -> bool:
        return self.found is not None or self.error is not None

    @property
    def lacks_some(self) -> bool:
        """Whether the answer came before all was there that the hub has; more may be there by now."""
        return self.waits_for_store and self.found is not None and bool(self.found.on_the_way)

    @property
    def has_ended(self) -> bool:
        """Whether the lease on the matches has ended with the session that it was asked for in."""
        return self.found is not None and self._client.registrations != self._registration

    def close(self) -> None:
        """End the lease that the answer brought, or still brings."""
        with contextlib.suppress(BlendHubError):
            if self.found is None and not self._reply.done():
                self._reply.abandon()
            elif (found := self.answer()) and found.lease is not None:
                self._client.release(found.lease)
