"""A worker's saves: copies begin in the step that completes a chunk, and what is copied is committed."""

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack

from blendhub.contracts import Segment
from blendhub.core.errors import DeadlineExceeded, HubError
from blendhub.core.spans import Span
from blendhub.vllm.messages import SaveJob, WorkerReport
from blendhub.vllm.worker.layer_copies import LayerCopies
from blendhub.vllm.worker.load_task import Open
from blendhub.vllm.worker.loaded_adapters import LoadedAdapters
from blendhub.vllm.worker.request import WorkerRequest
from blendhub.vllm.worker.save import Save

log = logging.getLogger(__name__)
PARTS, PART_TOKENS = 16, 128
"""Where copies take the engine's time, a step copies one part in so many of what waits, and at least so many tokens."""


class Saves:
    """Called by the worker's thread, which waits for no copy and no commit: each step looks how far they are.

    A request's blocks can be freed when its copies have ended, before the commits.
    """

    def __init__(
        self,
        requests: Mapping[str, WorkerRequest],
        open: Open,
        copies: LayerCopies,
        adapters: LoadedAdapters,
        timeout_s: float,
    ) -> None:
        self._requests = requests
        self._open = open
        self._copies = copies
        self._adapters = adapters
        self._timeout_s = timeout_s
        self._saved_tokens = 0
        self._seconds: list[float] = []
        self._failures: Counter[str] = Counter()
        self._logged: set[str] = set()

    def begin(self, jobs: Iterable[SaveJob], record: Callable[[str], WorkerRequest]) -> None:
        """Begin to copy, as soon as there is a session with the hub. If the engine waits for copies, a step copies only
        a part of what earlier steps have computed, so that no token is late by more than that.
        """
        if not self._copies.overlaps_compute:
            self._copy(-(-self._n_waiting // (PARTS * PART_TOKENS)) * PART_TOKENS)
        for job in jobs:
            record(job.request).saves.append(Save(job, self._timeout_s))
        if self._copies.overlaps_compute:
            self._copy(self._n_waiting)

    def free_blocks(self, requests: Collection[str] | None) -> None:
        """Let vLLM reuse the blocks of these requests, after their reads; None: of all requests."""
        freed = [record for record in self._requests.values() if requests is None or record.name in requests]
        if any(save.waits for record in freed for save in record.saves):
            self._copy(self._n_waiting, freed)
        for record in freed:
            for save in list(record.saves):
                if save.copy and save.reads_pages:
                    save.reads_pages = False
                    with contextlib.suppress(Exception):  # the end of the copy raises it again
                        save.copy.release_pages()
                elif save.waits:
                    self._fail(record, save, DeadlineExceeded("vLLM freed its blocks before the session was open"))

    def go_on(self) -> None:
        """Commit what is copied by now, in order, and hear what the hub has answered."""
        for record in self._requests.values():
            if record.saves:
                self._go_on(record)

    @property
    def are_copying(self) -> bool:
        """Whether a copy is under way."""
        return any(save.copy for record in self._requests.values() for save in record.saves)

    def wait(self) -> None:
        """End all copies that have begun, and commit them."""
        for record in self._requests.values():
            for save in list(record.saves):
                if save.copy:
                    with contextlib.suppress(Exception):
                        save.copy.wait()
        self.go_on()

    def report(self, report: WorkerReport) -> None:
        """Add what was saved, and what failed, since the last time."""
        report.saved_tokens, self._saved_tokens = self._saved_tokens, 0
        report.save_seconds, self._seconds = tuple(self._seconds), []
        report.failed_saves, self._failures = dict(self._failures), Counter()

    @property
    def _n_waiting(self) -> int:
        """The tokens that are not copied yet."""
        return sum(len(save.left) for record in self._requests.values() for save in record.saves)

    def _copy(self, n_tokens: int, records: Iterable[WorkerRequest] | None = None) -> None:
        """Begin to copy the first ``n_tokens`` of what waits: of these requests; None: of all."""
        for record in list(self._requests.values()) if records is None else records:
            waiting: set[int] = set()
            """The leases of which a save waits: those of a lease are done in order."""
            for save in [save for save in record.saves if save.waits]:
                if n_tokens <= 0:
                    return
                if save.job.right.lease not in waiting and save in record.saves:
                    n_tokens -= self._copy_part(record, save, n_tokens)
                if save.waits:
                    waiting.add(save.job.right.lease)

    def _copy_part(self, record: WorkerRequest, save: Save, n_tokens: int) -> int:
        """Begin to copy the first ``n_tokens`` of what is left of a save; returns how many were begun."""
        job = save.job
        if job.right in record.failed_rights:
            record.saves.remove(save)
            return 0
        try:
            arena = self._open()
            if arena is None:
                if time.monotonic() > save.until:
                    raise DeadlineExceeded("the session with the hub was not open for too long")
                return 0
            client, span = arena.client, job.slot.span
            save.client = client  # which ends the right if the save fails
            self._adapters.check(job.adapter, is_loaded=False)
            if job.right.arena != arena.nonce:
                raise HubError("the slots are of another arena than this worker has; the hub was restarted")
            part = Span(save.left.start, min(span.end, save.left.start + n_tokens))
            segment = Segment(part, client.shard_at(job.slot.slot), part.start - span.start, part.start)
            with ExitStack() as right:
                right.enter_context(client.writing(job.right))
                # What another rank with the same KV writes is committed by this one, too, in the same order.
                writes = client.namespace.writes(client.rank, span)
                parts = [self._copies.save([segment], job.blocks)] if writes else []
                save.begun(part.end, parts, right)
            return len(part)
        except Exception as error:  # the accelerator may fail, and the request does not need its save
            self._fail(record, save, error)
            return 0

    def _go_on(self, record: WorkerRequest) -> None:
        is_before_copy: set[int] = set()
        for save in list(record.saves):
            lease = save.job.right.lease
            if save.commit:
                self._hear(record, save)
            elif save.copy and lease not in is_before_copy and save.copy.done():
                self._commit(record, save)
            else:
                # A commit vouches for all of its lease before it.
                is_before_copy.add(lease)

    def _commit(self, record: WorkerRequest, save: Save) -> None:
        try:
            save.end_copy()
            if save.job.right in record.failed_rights:
                record.saves.remove(save)
                return
            assert save.client
            save.commit = save.client.commit(save.job.right, save.job.slot.span.end)
        except Exception as error:  # after any error the request's blocks must be freed
            self._fail(record, save, error)
        else:
            self._hear(record, save)

    def _hear(self, record: WorkerRequest, save: Save) -> None:
        """Take note of the hub's answer to a commit, if there is one."""
        if save.commit is None or not save.commit.done():
            return
        if save.commit.error:
            self._fail(record, save, save.commit.error)
        else:
            record.saves.remove(save)
            self._saved_tokens += len(save.job.slot.span)
            self._seconds.append(time.monotonic() - save.begun_at)

    def _fail(self, record: WorkerRequest, save: Save, error: BaseException) -> None:
        """End a save and its right, so that nothing of the lease is committed behind it."""
        reason, right = type(error).__name__, save.job.right
        if reason not in self._logged:
            self._logged.add(reason)
            log.warning("KV of request %s is not stored: %s", record.name, error)
        self._failures[reason] += 1
        record.failed_rights.add(right)
        record.saves = [
            other for other in record.saves if other is not save and not (other.waits and other.job.right == right)
        ]
        if save.client:
            save.client.abort(right)
