"""A worker's saves: copies begin in the step that completes a chunk, and what is copied is committed."""

import contextlib
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

from blendhub.client.hub_client import HubClient
from blendhub.client.write_rights import WriteRight
from blendhub.contracts import Segment, Transfer
from blendhub.core.errors import BlendHubError, DeadlineExceeded, HubError
from blendhub.core.spans import Span
from blendhub.vllm.messages import SaveJob
from blendhub.vllm.worker.layer_copies import LayerCopies, Transfers
from blendhub.vllm.worker.load_task import Open
from blendhub.vllm.worker.loaded_adapters import LoadedAdapters

log = logging.getLogger(__name__)

RunLater = Callable[[Callable[[], None]], None]
"""Runs functions in order on the executor's thread."""


PARTS, PART_TOKENS = 16, 128
"""Where copies take the engine's time, a step copies one part in so many of what waits, and at least so many tokens."""


class WaitingSave(NamedTuple):
    """A save that waits for the session with the hub, or for the next step."""

    job: SaveJob
    until: float
    """When the session must be open."""
    start: int
    """The first token that is not copied yet."""
    begun: tuple[Transfer, ...] = ()
    """The copies of the tokens before it."""


class Copy(NamedTuple):
    """A copy under way."""

    job: SaveJob
    transfer: Transfer
    right: ExitStack
    """The right to write is held until the copy has ended."""
    client: HubClient
    begun_at: float


class FailedSave(NamedTuple):
    """A failed save: nothing of the lease may be committed from ``start`` on."""

    start: int
    client: HubClient | None


class Saves:
    """The worker's thread begins copies, a thread waits for them to end, and the executor's thread commits them.

    The engine waits for neither. A request's blocks can be freed when its copies have ended, before the commits.
    """

    def __init__(
        self, open: Open, copies: LayerCopies, adapters: LoadedAdapters, run_later: RunLater, timeout_s: float
    ) -> None:
        self._open = open
        self._layers = copies
        self._adapters = adapters
        self._run_later = run_later
        self._timeout_s = timeout_s
        self._waiting: list[WaitingSave] = []
        self._copies: queue.SimpleQueue[Copy | None] = queue.SimpleQueue()
        self._state = threading.Lock()
        """Guards what follows, which all three threads change."""
        self._copying: dict[Transfer, str] = {}
        """The copies under way, and their requests."""
        self._reading: set[Transfer] = set()
        """Those of them whose reads of pages the engine's next work does not follow yet."""
        self._committing: Counter[str] = Counter()
        self._saved_tokens = 0
        self._seconds: list[float] = []
        self._failures: Counter[str] = Counter()
        self._logged: set[str] = set()
        self._failed: dict[str, dict[WriteRight, FailedSave]] = {}
        """The failed saves, by request and right."""
        self._thread = threading.Thread(target=self._finish_copies, name="blendhub-saver", daemon=True)
        self._thread.start()

    def begin(self, jobs: Iterable[SaveJob]) -> None:
        """Begin to copy, as soon as there is a session with the hub. If the engine waits for copies, a step copies only
        a part of what earlier steps have computed, so that no token is late by more than that.
        """
        until = time.monotonic() + self._timeout_s
        begun = [WaitingSave(job, until, job.slot.span.start) for job in jobs]
        if self._layers.overlaps_compute:
            self._waiting += begun
            self._copy_waiting(self._n_waiting)
        else:
            self._copy_waiting(-(-self._n_waiting // (PARTS * PART_TOKENS)) * PART_TOKENS)
            self._waiting += begun

    def settle(self, freed: Collection[str] | None) -> None:
        """Let vLLM reuse the blocks of these requests, after their reads; None: of all requests."""
        if self._waiting and (freed is None or freed):
            self._copy_waiting(self._n_waiting, freed)
        with self._state:
            reading = {copy for copy in self._reading if freed is None or self._copying[copy] in freed}
            self._reading -= reading
        for copy in reading:
            with contextlib.suppress(Exception):  # the saver's thread hears it, too
                copy.release_pages()
        saves, self._waiting = self._waiting, []
        for save in saves:
            if freed is None or save.job.request in freed:
                error = DeadlineExceeded("vLLM freed its blocks before the session with the hub was open")
                self._fail(save.job, error)
            else:
                self._waiting.append(save)

    @property
    def _n_waiting(self) -> int:
        """The tokens that are not copied yet."""
        return sum(save.job.slot.span.end - save.start for save in self._waiting)

    def _copy_waiting(self, n_tokens: int, requests: Collection[str] | None = None) -> None:
        """Begin to copy the first ``n_tokens`` of what waits: of these requests; None: of all."""
        saves, self._waiting = self._waiting, []
        for number, save in enumerate(saves):
            if not n_tokens:
                self._waiting += saves[number:]
                break
            job, span, arena = save.job, save.job.slot.span, None
            if self._has_failed(job):
                continue
            try:
                if requests is None or job.request in requests:
                    arena = self._open()
                    if arena is None and time.monotonic() > save.until:
                        raise DeadlineExceeded("the session with the hub was not open for too long")
                # The saves of a lease are done in order.
                if arena is None or any(other.job.right == job.right for other in self._waiting):
                    self._waiting.append(save)
                    continue
                self._adapters.check(job.adapter, is_loaded=False)
                if job.right.arena != arena.nonce:
                    raise HubError("the slots are of another arena than this worker has; the hub was restarted")
                part = Span(save.start, min(span.end, save.start + n_tokens))
                n_tokens -= len(part)
                segment = Segment(part, arena.client.shard_at(job.slot.slot), part.start - span.start, part.start)
                with ExitStack() as right:
                    right.enter_context(arena.client.writing(job.right))
                    # What another rank with the same KV writes is committed by this one, too, in the same order.
                    writes = arena.client.namespace.writes(arena.client.rank, span)
                    begun = (*save.begun, self._layers.save([segment], job.blocks)) if writes else ()
                    if part.end < span.end:
                        self._waiting.append(save._replace(start=part.end, begun=begun))
                    else:
                        self.add(Copy(job, Transfers(begun), right.pop_all(), arena.client, time.monotonic()))
            except Exception as error:  # the accelerator may fail, and the request does not need its save
                self._fail(job, error, arena.client if arena else None)

    def wait(self) -> None:
        """Return when all copies that have begun have ended."""
        with self._state:
            copying = [*self._copying]
        for copy in copying:
            with contextlib.suppress(Exception):
                copy.wait()

    def is_copying(self) -> bool:
        """Whether a copy is under way."""
        with self._state:
            return bool(self._copying)

    def needs_blocks(self, request: str) -> bool:
        """Whether a copy of this request is under way, or has yet to begin."""
        with self._state:
            return request in self._copying.values() or any(save.job.request == request for save in self._waiting)

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

    def add(self, copy: Copy) -> None:
        """Have a copy finished and committed that has begun."""
        with self._state:
            self._copying[copy.transfer] = copy.job.request
            self._reading.add(copy.transfer)
            self._committing[copy.job.request] += 1
        self._copies.put(copy)

    def _has_failed(self, job: SaveJob) -> bool:
        """Whether this save, or an earlier one of its lease, has failed."""
        with self._state:
            failed = self._failed.get(job.request, {}).get(job.right)
            return failed is not None and job.slot.span.end > failed.start

    def _fail(self, job: SaveJob, error: BaseException, client: HubClient | None = None) -> None:
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

    # On the saver's thread.

    def _finish_copies(self) -> None:
        while copy := self._copies.get():
            try:
                with copy.right:
                    copy.transfer.wait()
            except Exception as error:  # after any error the request's blocks must be freed
                self._fail(copy.job, error, copy.client)
            self._run_later(partial(self._commit, copy))
            with self._state:
                del self._copying[copy.transfer]
                self._reading.discard(copy.transfer)

    # On the executor's thread.

    def _commit(self, copy: Copy) -> None:
        job = copy.job
        try:
            if not self._has_failed(job):
                copy.client.commit(job.right, job.slot.span.end)
                with self._state:
                    self._saved_tokens += len(job.slot.span)
                    self._seconds.append(time.monotonic() - copy.begun_at)
        except Exception as error:
            self._fail(job, error, copy.client)
        with self._state:
            self._committing -= Counter([job.request])


def _abort(client: HubClient, right: WriteRight) -> None:
    with contextlib.suppress(BlendHubError):
        client.abort(right)
