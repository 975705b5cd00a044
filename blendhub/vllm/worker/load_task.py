"""The load of one request on a worker: acquire a read lease, copy, and release the lease to prove that it held."""

import contextlib
import logging
import math
import time
from collections.abc import Callable
from enum import IntEnum

from blendhub.client.hub_client import HubClient
from blendhub.client.session import PendingReply
from blendhub.client.wire import Acquired, Done
from blendhub.contracts import Transfer
from blendhub.core.errors import BlendHubError, DeadlineExceeded, HubError, LeaseError
from blendhub.vllm.messages import LoadJob
from blendhub.vllm.worker.recompute import Blend

log = logging.getLogger(__name__)
Open = Callable[[], HubClient | None]
"""The client; None while it is being registered. Raises if that failed."""

Copy = Callable[[HubClient, Acquired], Transfer]
ReleaseLate = Callable[[HubClient, PendingReply[Acquired]], None]
"""Ends the lease that a late answer brings."""

LONG_COPY_S = 60.0


class Arrival(IntEnum):
    """How far a load has come on a rank. The lowest of all ranks counts: no rank fails while another still copies."""

    PENDING = 0
    FAILED = 1
    LOST = 2
    """The lease ended before the copy had: it may be tried again."""
    COPIED = 3
    """Recomputation may begin; the proof that the lease held is still missing."""
    PROVEN = 4
    """The lease held until the copy had ended, so the copied bytes are those that were found."""


class LoadTask:
    """``advance`` takes it forward and never waits for the hub. The hub has ``timeout_s`` for all of its answers."""

    def __init__(self, job: LoadJob, open: Open, copy: Copy, release_late: ReleaseLate, timeout_s: float) -> None:
        self.job = job
        self.blend: Blend | None = None
        self.error: Exception | None = None
        self.is_cancelled = False
        self.is_second = False
        """Whether this is the second try, after the first lease was lost."""
        self.epoch: int | None = None
        """The epoch of the hub whose KV is loaded."""
        self.seconds = 0.0
        """The seconds until the KV was copied."""
        self._open = open
        self._copy = copy
        self._release_late = release_late
        # One half to acquire the lease, and one to release it.
        self._timeout_s = timeout_s / 2
        self._begun_at = time.monotonic()
        self._client: HubClient | None = None
        self._acquiring: PendingReply[Acquired] | None = None
        self._lease: int | None = None
        self._transfer: Transfer | None = None
        self._releasing: PendingReply[Done] | None = None
        self._is_proven = False
        self._warn_at = self._begun_at + LONG_COPY_S

    @property
    def is_copying(self) -> bool:
        return self._transfer is not None

    @property
    def arrival(self) -> Arrival:
        if self.error:
            if self._transfer:
                return Arrival.PENDING
            return Arrival.LOST if isinstance(self.error, LeaseError) else Arrival.FAILED
        if self._is_proven:
            return Arrival.PROVEN
        return Arrival.COPIED if self._releasing else Arrival.PENDING

    def cancel(self) -> None:
        """The request was aborted; the load ends when its copy has ended."""
        self.is_cancelled = True
        self.fail(HubError("the request was aborted"))

    def fail(self, error: Exception) -> None:
        """The load has failed; it ends when its copy has ended."""
        self.error = self.error or error
        acquiring, self._acquiring = self._acquiring, None
        if acquiring and self._client:
            self._release_late(self._client, acquiring)
        if not self._transfer:
            self._drop_lease()

    def advance(self) -> None:
        """Do what is possible without waiting."""
        try:
            if self._transfer:
                self._finish_copy(self._transfer)
            elif self.error or self._is_proven:
                return
            elif self._releasing:
                self._prove(self._releasing)
            elif self._acquiring:
                self._begin_copy(self._acquiring)
            else:
                self._ask()
        except Exception as error:  # vLLM can compute the tokens after any error
            self.fail(error)

    def _ask(self) -> None:
        self._client = self._open()
        left = self._begun_at + self._timeout_s - time.monotonic()
        if left <= 0:  # the hub is not asked: its silence would be taken for its end
            raise DeadlineExceeded("the worker's session with the hub was not open in time")
        if self._client:
            decision = self.job.decision
            self._acquiring = self._client.submit_acquire(
                decision.matches, self.job.variant, skip_prefix=decision.start, timeout=left
            )

    def _begin_copy(self, acquiring: PendingReply[Acquired]) -> None:
        assert self._client
        if not acquiring.done():
            self._client.check_up()
            return
        self._acquiring = None
        acquired = acquiring.result()
        self._lease, self.epoch = acquired.lease, self._client.epoch
        self._transfer = self._copy(self._client, acquired)
        self.advance()

    def _finish_copy(self, transfer: Transfer) -> None:
        if not transfer.done():
            self._warn_of_copy()
            return
        self._transfer = None
        try:
            transfer.wait()
        except BaseException:
            self._drop_lease()
            raise
        if self.error:
            self._drop_lease()
            return
        assert self._client
        if self._lease is None:
            raise HubError("the hub has evicted everything that was found")
        self._releasing = self._client.submit_release(self._lease, timeout=self._timeout_s)
        self.seconds = time.monotonic() - self._begun_at

    def _warn_of_copy(self) -> None:
        """Warn once that vLLM cannot have the blocks back while the device may still write into them."""
        if self._warn_at < time.monotonic():
            self._warn_at = math.inf
            log.warning(
                "the copy of request %s has not ended within %.0f s, and the request waits for it; if it never does, "
                "the device is stuck: end the engine",
                self.job.request, LONG_COPY_S,
            )  # fmt: skip

    def _prove(self, releasing: PendingReply[Done]) -> None:
        assert self._client
        if releasing.done():
            # A restarted hub does not know the lease, because leases have random ids.
            releasing.result()
            self._is_proven = True
        else:
            self._client.check_up()

    def _drop_lease(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None and self._client and not self._releasing:
            with contextlib.suppress(BlendHubError):
                self._client.submit_release(lease)
