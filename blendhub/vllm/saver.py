"""What a worker stores: copies under way, and their commits."""

import contextlib
import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import ExitStack
from functools import partial

from blendhub.client import HubClient
from blendhub.contracts import Transfer
from blendhub.errors import BlendHubError
from blendhub.vllm.messages import Save
from blendhub.write_rights import WriteRight

log = logging.getLogger(__name__)


class Saver:
    """Waits for copies to end and commits them, so that the engine need not."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._state = threading.Condition()
        self._busy: Counter[str] = Counter()
        self._saved_tokens = 0
        self._failures: Counter[str] = Counter()
        self._told: set[str] = set()
        self._given_up: dict[str, dict[WriteRight, HubClient | None]] = {}
        """By request, rights of which a part was not written: nothing behind it may be committed."""
        self._thread = threading.Thread(target=self._run, name="blendhub-saver", daemon=True)
        self._thread.start()

    def add(self, job: Save, transfer: Transfer, right: ExitStack, client: HubClient) -> None:
        """A copy, and the right to write that it needs until it has ended."""
        with self._state:
            self._busy[job.request] += 1
        self._work.put(partial(self._finish, job, transfer, right, client))

    def note(self, job: Save, error: BaseException, client: HubClient | None = None) -> None:
        """A save that failed, before it began or after."""
        with self._state:
            reason = type(error).__name__
            if reason not in self._told:
                self._told.add(reason)
                log.warning("KV of request %s is not stored: %s", job.request, error)
            self._failures[reason] += 1
            self._given_up.setdefault(job.request, {})[job.right] = client

    def gave_up(self, job: Save) -> bool:
        """Whether something before this in the lease was not written."""
        with self._state:
            return job.right in self._given_up.get(job.request, ())

    def is_busy_with(self, request: str) -> bool:
        with self._state:
            return request in self._busy

    def forget(self, request: str) -> None:
        """There will be no more saves of this request."""
        with self._state:
            rights = self._given_up.pop(request, {})
        for right, client in rights.items():
            if client:
                self._work.put(partial(_abort, client, right))

    def wait(self, requests: Collection[str] | None = None) -> None:
        """Return when no copy of these requests is under way; None: of any."""
        with self._state:
            self._state.wait_for(lambda: not (self._busy if requests is None else self._busy.keys() & set(requests)))

    def take_numbers(self) -> tuple[int, dict[str, int]]:
        """Tokens saved, and failures by reason, since the last time."""
        with self._state:
            saved, self._saved_tokens = self._saved_tokens, 0
            failures, self._failures = dict(self._failures), Counter()
            return saved, failures

    def close(self) -> None:
        """Finish what was begun."""
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()

    def _finish(self, job: Save, transfer: Transfer, right: ExitStack, client: HubClient) -> None:
        try:
            with right:
                transfer.wait()
            if not self.gave_up(job):
                client.commit(job.right, job.span.end)
                with self._state:
                    self._saved_tokens += len(job.span)
        except Exception as error:  # whatever it is, the request's blocks must not be kept for ever
            self.note(job, error, client)
        with self._state:
            self._busy[job.request] -= 1
            if not self._busy[job.request]:
                del self._busy[job.request]
            self._state.notify_all()


def _abort(client: HubClient, right: WriteRight) -> None:
    with contextlib.suppress(BlendHubError):
        client.abort(right)
