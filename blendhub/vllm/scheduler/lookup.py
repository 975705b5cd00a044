"""The lookup of one prompt in the hub."""

import contextlib
import time
from functools import partial

from blendhub.client.hub_client import HubClient
from blendhub.client.session import PendingReply
from blendhub.client.wire import Found
from blendhub.core.errors import BlendHubError, DeadlineExceeded, PeerGone
from blendhub.core.layout import Variant
from blendhub.core.tokens import Tokens
from blendhub.vllm.hub_executor import HubExecutor

STORE_SHARE = 0.8
"""The share of the timeout that the hub may spend on reading matches from its store."""


class Reading:
    """The lease of a lookup while workers copy what it covers. The session with the hub extends it until ``end``."""

    def __init__(self, client: HubClient, found: Found, epoch: int) -> None:
        assert found.lease is not None
        self.lease = found.lease
        self.epoch = epoch
        self.pieces = found.pieces
        self._client = client
        client.kept_leases.add(self.lease)

    def end(self) -> None:
        self._client.kept_leases.discard(self.lease)


class Lookup:
    """A lookup, sent at once if the session is open, otherwise by a later ``send``. Nothing here waits.

    The hub has ``timeout_s`` to answer, from when the lookup was sent. An answer that came in time is kept.
    """

    def __init__(
        self,
        executor: HubExecutor,
        variant: Variant,
        tokens: Tokens,
        timeout_s: float,
        *,
        settled: float | None,
        skip_prefix: int = 0,
        waits_for_store: bool = True,
    ) -> None:
        """``settled``: the least share that was recomputed in settled KV; None: find none. ``skip_prefix``: so many
        tokens are not needed."""
        self.skip_prefix = skip_prefix
        self.waits_for_store = waits_for_store
        self._executor = executor
        self._submit = partial(
            HubClient.submit_lookup,
            tokens=tokens,
            variant=variant,
            skip_prefix=skip_prefix,
            wait_s=timeout_s * STORE_SHARE if waits_for_store else 0.0,
            settled=settled,
            timeout=timeout_s,
        )
        self._timeout_s = timeout_s
        self._begun_at = self.sent_at = time.monotonic()
        self._client: HubClient | None = None
        self._epoch = 0
        self._reply: PendingReply[Found] | None = None
        self._found: Found | None = None
        self._error: BlendHubError | None = None
        self.send()

    def send(self) -> None:
        """Send the lookup if it was not sent yet and the session is open."""
        if self._reply or self._error:
            return
        try:
            client = self._executor.client()
            if client:
                self._client, self._epoch, self.sent_at = client, client.epoch, time.monotonic()
                self._reply = self._submit(client)
        except BlendHubError as error:
            self._error = error

    @property
    def is_sent(self) -> bool:
        return self._reply is not None

    def answer(self) -> Found | None:
        """The hub's answer; None while there is none. Raises if the lookup failed or timed out."""
        if self._found is None:
            self.send()
            if self._error:
                raise self._error
            if self._reply:
                self._found = self._received()
            else:
                self._check_time()
        return self._found

    def _received(self) -> Found | None:
        assert self._reply and self._client
        if self._reply.done():
            try:
                return self._reply.result()
            except DeadlineExceeded as error:
                # Kept, because asking for the result notes each time that the hub does not answer.
                self._error = DeadlineExceeded(f"the lookup took more than lookup_timeout_s {self._timeout_s}")
                raise self._error from error
        try:
            self._client.check_up()
        except PeerGone as error:
            self._executor.release_late(self._client, self._reply)
            self._error = error
            raise
        return None

    def _check_time(self) -> None:
        if time.monotonic() - self._begun_at > self._timeout_s:
            self._error = DeadlineExceeded(
                f"the session with the hub was not open within lookup_timeout_s {self._timeout_s}"
            )
            raise self._error

    @property
    def has_expired(self) -> bool:
        """Whether the lease on the matches has expired."""
        found = self._found
        return found is not None and found.lease is not None and time.monotonic() > self.sent_at + found.expires_s

    @property
    def expires_soon(self) -> bool:
        """Whether half of the lease's time has passed."""
        with contextlib.suppress(BlendHubError):
            self.answer()
        found = self._found
        return found is not None and found.lease is not None and time.monotonic() > self.sent_at + found.expires_s / 2

    def begin_reading(self) -> Reading:
        """Leave the lease to the workers, which release it; it holds until then, or until ``end``."""
        assert self._client and self._found and self._found.lease is not None
        self._reply = None
        return Reading(self._client, self._found, self._epoch)

    def close(self) -> None:
        """End the lease that the answer brought, or still brings."""
        if self._client is None or self._reply is None or self._error:
            return
        if self._found is None:
            self._executor.release_late(self._client, self._reply)
        elif self._found.lease is not None:
            with contextlib.suppress(BlendHubError):
                self._client.submit_release(self._found.lease)
        self._reply = None
