"""A worker's saves: copies begin in the step that completes a chunk, and what is copied is committed."""

import contextlib
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack

import numpy as np
import numpy.typing as npt

from blendhub.client.answer import Answer
from blendhub.client.hub_client import HubClient
from blendhub.client.wire import Done
from blendhub.client.write_rights import WriteRight
from blendhub.contracts import Segment, Transfer
from blendhub.core.errors import DeadlineExceeded, HubError
from blendhub.core.spans import Span
from blendhub.system.recurring import RecurringWarnings
from blendhub.vllm.messages import SaveJob, WorkerReport
from blendhub.vllm.worker.layer_copies import LayerCopies, Transfers
from blendhub.vllm.worker.load_task import Open, PinnedArena
from blendhub.vllm.worker.loaded_adapters import LoadedAdapters
from blendhub.vllm.worker.recompute import HostCopy
from blendhub.vllm.worker.request import WorkerRequest

log = logging.getLogger(__name__)
MAX_MAPS = 16
"""The most maps that wait for their slots; few, because each is large."""
PARTS, PART_TOKENS = 16, 128
"""Where copies take the engine's time, a step copies one part in so many of what waits, and at least so many tokens."""


class Save:
    """One chunk, which waits for the session with the hub or for a later step, is copied, and then committed."""

    def __init__(self, job: SaveJob, timeout_s: float) -> None:
        self.job = job
        self.until = time.monotonic() + timeout_s
        """When the session must be open."""
        self.left = job.slot.span
        """The tokens whose copy has not begun."""
        self.begun_at = 0.0
        self.copy: Transfer | None = None
        """Set while the copy is under way."""
        self.reads_pages = False
        """Whether the engine's next work does not follow the copy's reads yet."""
        self.commit: Answer[Done] | None = None
        self.client: HubClient | None = None
        """The client that has the right to write, once there is a session."""
        self.is_over = False
        """Whether it is committed, or will not be."""
        self._parts: list[Transfer] = []
        """The copies of the tokens before ``left``."""
        self.right = ExitStack()
        """The right to write is held until the copy has ended."""

    @property
    def waits(self) -> bool:
        """Whether some tokens have yet to be copied."""
        return bool(self.left) and not self.is_over

    @property
    def needs_blocks(self) -> bool:
        """Whether some tokens have yet to be copied, or are being copied."""
        return self.copy is not None or self.waits

    def copy_part(
        self, arena: PinnedArena, copies: LayerCopies, n_tokens: int, map: npt.NDArray[np.uint8] | None
    ) -> int:
        """Begin to copy the first ``n_tokens`` of what is left; returns how many were begun.

        ``map``: the map with which the chunk ends.
        """
        job, client, span, start = self.job, arena.client, self.job.slot.span, self.left.start
        if job.right.arena != arena.nonce:
            raise HubError("the slots are of another arena than this worker has; the hub was restarted")
        part = Span(start, min(span.end, start + n_tokens))
        with ExitStack() as right:
            right.enter_context(client.writing(job.right))
            # What another rank with the same KV writes is committed by this one, too, in the same order.
            if client.namespace.writes(client.rank, span):
                segment = Segment(part, client.shard_at(job.slot.slot), start - span.start, start)
                state_at = client.state_at(job.slot.slot) if job.has_state and part.end == span.end else None
                self._parts.append(copies.save([segment], job.blocks, state_at))
            self.left = Span(part.end, span.end)
            if not self.left:
                if job.map_bytes:
                    if map is None:
                        raise HubError("the map of the segment is not kept any more")
                    client.map_of(job.slot.slot, job.map_bytes)[: len(map)] = map
                self.copy, self.reads_pages, self.begun_at = Transfers(self._parts), True, time.monotonic()
                self.right = right.pop_all()
        return len(part)


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
        self._warnings = RecurringWarnings(log)

    def begin(self, jobs: Iterable[SaveJob], record_of: Callable[[str], WorkerRequest]) -> None:
        """Begin to copy, as soon as there is a session with the hub. If the engine waits for copies, a step copies only
        a part of what earlier steps have computed, so that no token is late by more than that.
        """
        if not self._copies.overlaps_compute:
            waiting = [len(save.left) for record in self._requests.values() for save in record.saves if save.waits]
            self._copy(self._requests.values(), -(-sum(waiting) // (PARTS * PART_TOKENS)) * PART_TOKENS)
        for job in jobs:
            record = record_of(job.request)
            if job.right not in record.failed_rights:
                record.saves.append(Save(job, self._timeout_s))
        if self._copies.overlaps_compute:
            self._copy(self._requests.values())

    def keep_maps(self, record: WorkerRequest, made: Mapping[Span, HostCopy]) -> None:
        """Keep maps until their segments are stored, which a later plan says. Of too many, those of the oldest loads
        are dropped."""
        record.maps |= {span.end: map for span, map in made.items()}
        by_load = sorted(self._requests.values(), key=lambda request: request.load_number)
        kept = [(request, end) for request in by_load for end in request.maps]
        for request, end in kept[:-MAX_MAPS]:
            del request.maps[end]

    def free_blocks(self, requests: Collection[str] | None) -> None:
        """Let vLLM reuse the blocks of these requests, after their reads; None: of all requests. The blocks of states
        are in no request's table any more."""
        freed = [
            record
            for record in self._requests.values()
            if requests is None or record.name in requests or any(save.job.has_state for save in record.saves)
        ]
        self._copy(freed)
        for record in freed:
            for save in record.saves:
                if save.copy and save.reads_pages:
                    save.reads_pages = False
                    with contextlib.suppress(Exception):  # the end of the copy raises it again
                        save.copy.release_pages()
            for save in [save for save in record.saves if save.waits]:
                self._fail(record, save, DeadlineExceeded("vLLM freed its blocks before the session was open"))

    def go_on(self, *, waits: bool = False) -> None:
        """Commit what is copied by now, in order, and hear what the hub has answered.

        ``waits``: until all copies that have begun have ended.
        """
        for record in self._requests.values():
            uncopied: set[WriteRight] = set()
            """The rights of saves that are not copied yet: a commit vouches for all of its lease before it."""
            for save in record.saves:
                right = save.job.right
                try:
                    if save.copy and (waits or save.copy.done()):
                        copy, save.copy = save.copy, None
                        with save.right:
                            copy.wait()
                        save.is_over = right in record.failed_rights
                    if save.needs_blocks:
                        uncopied.add(right)
                    elif not (save.commit or save.is_over or right in uncopied):
                        assert save.client
                        save.commit = save.client.commit(right, save.job.slot.span.end)
                    if save.commit and save.commit.done():
                        save.commit.result()
                        save.is_over = True
                        self._saved_tokens += len(save.job.slot.span)
                        self._seconds.append(time.monotonic() - save.begun_at)
                except Exception as error:  # after any error the request's blocks must be freed
                    self._fail(record, save, error)
            record.saves = [save for save in record.saves if not save.is_over]

    @property
    def are_copying(self) -> bool:
        """Whether a copy is under way."""
        return any(save.copy for record in self._requests.values() for save in record.saves)

    def report(self, report: WorkerReport) -> None:
        """Add what was saved, and what failed, since the last time."""
        report.saved_tokens, self._saved_tokens = self._saved_tokens, 0
        report.save_seconds, self._seconds = tuple(self._seconds), []
        report.failed_saves, self._failures = dict(self._failures), Counter()

    def _copy(self, records: Iterable[WorkerRequest], n_tokens: int = sys.maxsize) -> None:
        """Begin to copy the first ``n_tokens`` of what waits, if there is a session."""
        for record in records:
            for save in record.saves:
                if n_tokens <= 0:
                    return
                if not save.waits:
                    continue
                try:
                    if arena := self._open():
                        save.client = arena.client  # which ends the right if the save fails
                        self._adapters.check(save.job.adapter, is_loaded=False)
                        n_tokens -= save.copy_part(arena, self._copies, n_tokens, _map_of(save.job, record))
                        if save.job.map_bytes and not save.left:
                            del record.maps[save.job.slot.span.end]
                    elif time.monotonic() > save.until:
                        raise DeadlineExceeded("the session with the hub was not open for too long")
                except Exception as error:  # the accelerator may fail, and the request does not need its save
                    self._fail(record, save, error)

    def _fail(self, record: WorkerRequest, save: Save, error: Exception) -> None:
        """End a save and its right, so that nothing of the lease is committed behind it."""
        kind, right = type(error).__name__, save.job.right
        self._warnings.warn(kind, f"KV of request {record.name} is not stored: {error}", error)
        self._failures[kind] += 1
        record.failed_rights.add(right)
        for other in record.saves:
            # What is being copied ends with its copy, and what is being committed with the hub's answer.
            if other is save or (other.job.right == right and not other.copy and not other.commit):
                other.is_over = True
        if save.client:
            save.client.abort(right)


def _map_of(job: SaveJob, record: WorkerRequest) -> npt.NDArray[np.uint8] | None:
    map = record.maps.get(job.slot.span.end) if job.map_bytes else None
    if map:
        map.wait()
    return map.numbers() if map else None
