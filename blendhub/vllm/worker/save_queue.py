"""A worker's saves: it waits for copies to end and has them committed."""

import contextlib
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

from blendhub.client.hub_client import HubClient
from blendhub.client.write_rights import WriteRight
from blendhub.contracts import Transfer
from blendhub.core.errors import BlendHubError
from blendhub.vllm.messages import SaveJob

log = logging.getLogger(__name__)

RunLater = Callable[[Callable[[], None]], None]
"""Runs functions in order on the executor's thread."""


class FailedSave(NamedTuple):
    """A failed save: nothing of the lease may be committed from ``start`` on."""

    start: int
    client: HubClient | None


class SaveQueue:
    """A thread waits for copies to end, and the executor's thread commits them; the engine waits for neither.

    A request's blocks can be freed when its copies have ended, before the commits.
    """

    def __init__(self, run_later: RunLater) -> None:
        self._run_later = run_later
        self._copies: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._state = threading.Condition()
        self._copying: Counter[str] = Counter()
        self._committing: Counter[str] = Counter()
        self._saved_tokens = 0
        self._seconds: list[float] = []
        self._failures: Counter[str] = Counter()
        self._logged: set[str] = set()
        self._failed: dict[str, dict[WriteRight, FailedSave]] = {}
        """The failed saves, by request and right."""
        self._thread = threading.Thread(target=self._run, name="blendhub-saver", daemon=True)
        self._thread.start()

    def add(self, job: SaveJob, transfer: Transfer, right: ExitStack, client: HubClient) -> None:
        """Add a copy. ``right`` is held until the copy has ended."""
        with self._state:
            self._copying[job.request] += 1
            self._committing[job.request] += 1
        commit = partial(self._commit, job, client, time.monotonic())
        self._copies.put(partial(self._finish_copy, job, transfer, right, client, commit))

    def note(self, job: SaveJob, error: BaseException, client: HubClient | None = None) -> None:
        """Take note of a failed save."""
        with self._state:
            reason = type(error).__name__
            if reason not in self._logged:
                self._logged.add(reason)
                log.warning("KV of request %s is not stored: %s", job.request, error)
            self._failures[reason] += 1
            # Saves of a lease fail in order, except commits, which come later than copies.
            rights, start = self._failed.setdefault(job.request, {}), job.slot.span.start
            before = rights.get(job.right)
            rights[job.right] = FailedSave(min(start, before.start) if before else start, client)

    def has_failed(self, job: SaveJob) -> bool:
        """Whether this save, or an earlier one of its lease, has failed."""
        with self._state:
            failed = self._failed.get(job.request, {}).get(job.right)
            return failed is not None and job.slot.span.end > failed.start

    def is_copying(self, request: str | None = None) -> bool:
        """Whether a copy of a request is under way; None: of any request."""
        with self._state:
            return bool(self._copying) if request is None else request in self._copying

    def is_committing(self, request: str) -> bool:
        with self._state:
            return request in self._committing

    def forget(self, request: str) -> None:
        """Forget the request, which has no more saves: end the rights of failed ones."""
        with self._state:
            rights = self._failed.pop(request, {})
        for right, failed in rights.items():
            if failed.client:
                self._run_later(partial(_abort, failed.client, right))

    def wait(self, requests: Collection[str] | None = None) -> None:
        """Return when no copy of these requests is under way; None: of any."""
        with self._state:
            self._state.wait_for(
                lambda: not (self._copying if requests is None else self._copying.keys() & set(requests))
            )

    def take_numbers(self) -> tuple[int, tuple[float, ...], dict[str, int]]:
        """Tokens saved, the seconds of each save, and failures by reason, since the last time."""
        with self._state:
            saved, self._saved_tokens = self._saved_tokens, 0
            seconds, self._seconds = tuple(self._seconds), []
            failures, self._failures = dict(self._failures), Counter()
            return saved, seconds, failures

    def close(self) -> None:
        """Finish the copies that were begun."""
        self._copies.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (finish := self._copies.get()) is not None:
            finish()

    def _finish_copy(
        self, job: SaveJob, transfer: Transfer, right: ExitStack, client: HubClient, commit: Callable[[], None]
    ) -> None:
        try:
            with right:
                transfer.wait()
        except Exception as error:  # after any error the request's blocks must be freed
            self.note(job, error, client)
        self._run_later(commit)
        with self._state:
            _count_down(self._copying, job.request)
            self._state.notify_all()

    def _commit(self, job: SaveJob, client: HubClient, begun_at: float) -> None:
        try:
            if not self.has_failed(job):
                client.commit(job.right, job.slot.span.end)
                with self._state:
                    self._saved_tokens += len(job.slot.span)
                    self._seconds.append(time.monotonic() - begun_at)
        except Exception as error:
            self.note(job, error, client)
        with self._state:
            _count_down(self._committing, job.request)


def _count_down(counter: Counter[str], request: str) -> None:
    counter[request] -= 1
    if not counter[request]:
        del counter[request]


def _abort(client: HubClient, right: WriteRight) -> None:
    with contextlib.suppress(BlendHubError):
        client.abort(right)
