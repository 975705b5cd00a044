"""What a worker stores: copies under way, and their commits."""

import contextlib
import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

from blendhub.client import HubClient
from blendhub.contracts import Transfer
from blendhub.errors import BlendHubError
from blendhub.vllm.messages import Save
from blendhub.write_rights import WriteRight

log = logging.getLogger(__name__)

Later = Callable[[Callable[[], None]], None]
"""Does something on the thread that asks the hub, in the order in which it is given."""


class GivenUp(NamedTuple):
    """Nothing of a lease from ``start`` on may be committed."""

    start: int
    client: HubClient | None


class SaveQueue:
    """Waits for copies to end, on a thread of its own, and then has them committed, so that the engine need not.

    A request's blocks are free when its copies have ended: no commit is waited for.
    """

    def __init__(self, later: Later) -> None:
        self._later = later
        self._copies: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._state = threading.Condition()
        self._copying: Counter[str] = Counter()
        self._committing: Counter[str] = Counter()
        self._saved_tokens = 0
        self._failures: Counter[str] = Counter()
        self._told: set[str] = set()
        self._given_up: dict[str, dict[WriteRight, GivenUp]] = {}
        """By request, rights of which a part was not stored."""
        self._thread = threading.Thread(target=self._run, name="blendhub-saver", daemon=True)
        self._thread.start()

    def add(self, job: Save, transfer: Transfer, right: ExitStack, client: HubClient) -> None:
        """A copy, and the right to write that it needs until it has ended."""
        with self._state:
            self._copying[job.request] += 1
            self._committing[job.request] += 1
        self._copies.put(partial(self._finish_copy, job, transfer, right, client))

    def note(self, job: Save, error: BaseException, client: HubClient | None = None) -> None:
        """A save that failed, before it began or after."""
        with self._state:
            reason = type(error).__name__
            if reason not in self._told:
                self._told.add(reason)
                log.warning("KV of request %s is not stored: %s", job.request, error)
            self._failures[reason] += 1
            # Whatever fails later in a lease lies behind, but for commits: they come later than copies.
            rights = self._given_up.setdefault(job.request, {})
            before = rights.get(job.right)
            rights[job.right] = GivenUp(min(job.span.start, before.start) if before else job.span.start, client)

    def gave_up(self, job: Save) -> bool:
        """Whether something at or before this in the lease was not stored."""
        with self._state:
            given_up = self._given_up.get(job.request, {}).get(job.right)
            return given_up is not None and job.span.end > given_up.start

    def is_copying(self, request: str | None = None) -> bool:
        """Whether a request's blocks are still needed; None: any request's."""
        with self._state:
            return bool(self._copying) if request is None else request in self._copying

    def is_committing(self, request: str) -> bool:
        with self._state:
            return request in self._committing

    def forget(self, request: str) -> None:
        """There will be no more saves of this request."""
        with self._state:
            rights = self._given_up.pop(request, {})
        for right, given_up in rights.items():
            if given_up.client:
                self._later(partial(_abort, given_up.client, right))

    def wait(self, requests: Collection[str] | None = None) -> None:
        """Return when no copy of these requests is under way; None: of any."""
        with self._state:
            self._state.wait_for(
                lambda: not (self._copying if requests is None else self._copying.keys() & set(requests))
            )

    def take_numbers(self) -> tuple[int, dict[str, int]]:
        """Tokens saved, and failures by reason, since the last time."""
        with self._state:
            saved, self._saved_tokens = self._saved_tokens, 0
            failures, self._failures = dict(self._failures), Counter()
            return saved, failures

    def close(self) -> None:
        """Finish the copies that were begun."""
        self._copies.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (finish := self._copies.get()) is not None:
            finish()

    def _finish_copy(self, job: Save, transfer: Transfer, right: ExitStack, client: HubClient) -> None:
        try:
            with right:
                transfer.wait()
        except Exception as error:  # whatever it is, the request's blocks must not be kept for ever
            self.note(job, error, client)
        self._later(partial(self._commit, job, client))
        with self._state:
            _count_down(self._copying, job.request)
            self._state.notify_all()

    def _commit(self, job: Save, client: HubClient) -> None:
        try:
            if not self.gave_up(job):
                client.commit(job.right, job.span.end)
                with self._state:
                    self._saved_tokens += len(job.span)
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
