"""Queues of transfers: some streams for loads and as many for saves, so that a stream's bus copy overlaps others' work.

Each stream has its own staging. Everything that touches a stream's staging runs in that stream, in order. So only
the two ends of a transfer need events: it begins after the engine's earlier work, and has ended when its streams have
reached their events.

A thread of the queue submits the work. A long transfer takes thousands of calls, which would delay the engine's
thread, and block it once the accelerator's launch queue is full.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import cycle
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from blendhub.contracts import Transfer
from blendhub.devices.batches import Batch, BatchPlanner
from blendhub.devices.host_arena import HostArena
from blendhub.devices.runtime import Runtime


class Mover(ABC):
    """Moves a batch between memory that the device reaches and the engine's pages, in the current stream.

    ``memory`` is the staging or the arena, ``table`` the batch's in device memory.
    """

    @abstractmethod
    def rows_to_pages(self, memory: torch.Tensor, table: torch.Tensor, batch: Batch) -> None:
        """Write the batch to pages."""

    @abstractmethod
    def pages_to_rows(self, memory: torch.Tensor, table: torch.Tensor, batch: Batch) -> None:
        """Read the batch from pages."""


Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]


class StagingStream:
    """A stream with device memory for two tables and for the slices of one batch."""

    def __init__(self, runtime: Runtime, planner: BatchPlanner) -> None:
        self.handle = runtime.create_stream()
        memory = runtime.allocate(planner.table_bytes + planner.staging_bytes)
        tables, self.staging = memory[: planner.table_bytes], memory[planner.table_bytes :]
        self.table, self.source_table = tables.chunk(2)
        self._runtime = runtime
        self._bounce_buffer: torch.Tensor | None = None
        self._bounce_copied: Any = None
        self.unfinished: tuple[Batch, HostArena] | None = None
        """A saved batch that the host has yet to copy from the bounce buffer to the arena."""

    @property
    def bounce_buffer(self) -> torch.Tensor:
        """Pinned memory of the size of ``staging``, for parts of the arena that are not pinned."""
        if self._bounce_buffer is None:
            self._bounce_buffer = self._runtime.allocate_pinned(len(self.staging))
        return self._bounce_buffer

    def wait_for_bounce_copy(self) -> None:
        """Return when the copy between the bounce buffer and staging has ended."""
        if self._bounce_copied is not None:
            self._runtime.synchronize(self._bounce_copied)
            self._bounce_copied = None

    def copy_bounce_buffer(self, batch: Batch, *, to_staging: bool) -> None:
        """Submit the copy of the batch's slices between the bounce buffer and staging."""
        end = batch.slices[-1].staging_at + batch.slices[-1].nbytes
        target, source = self.staging[:end], self.bounce_buffer[:end]
        self._runtime.copy(self.handle, [(target, source) if to_staging else (source, target)])
        self._bounce_copied = self._runtime.record_event(self.handle)

    def table_pair(self, place: torch.Tensor, batch: Batch) -> Pair:
        """The place of the batch's table in device memory, and a copy of the table in pinned memory."""
        pinned = self._runtime.allocate_pinned(batch.table.nbytes)
        pinned.numpy()[:] = batch.table.view(np.uint8).reshape(-1)
        return place[: len(pinned)], pinned

    def staging_and_arena(self, batch: Batch, arena: HostArena) -> Iterator[Pair]:
        """Each slice in staging and in the arena, cut where parts of the arena were pinned apart."""
        for piece in batch.slices:
            sizes = [part.stop - part.start for part in arena.parts(piece.at, piece.at + piece.nbytes)]
            staged, stored = self.staging[piece.staged], arena.tensor[piece.stored]
            yield from zip(staged.split_with_sizes(sizes), stored.split_with_sizes(sizes), strict=True)


class Submitted(NamedTuple):
    """A transfer's events in the streams that it uses."""

    pages_done: list[Any]
    """After the last access to pages."""
    ends: list[Any]


class StreamTransfer(Transfer):
    def __init__(self, runtime: Runtime, submitted: Future[Submitted]) -> None:
        self._runtime = runtime
        self._submitted = submitted

    def done(self) -> bool:
        if not self._submitted.done():
            return False
        try:
            self._runtime.enter()
            return all(map(self._runtime.query, self._submitted.result().ends))
        except Exception:  # ``wait`` raises it, or another that tells more
            return True

    def wait(self) -> None:
        self._runtime.enter()
        _synchronize_all(self._runtime, self._submitted.result().ends)

    def release_pages(self) -> None:
        """The calling thread waits only until the queue's thread has submitted the transfer."""
        self._runtime.enter()
        for event in self._submitted.result().pages_done:
            self._runtime.wait_event(None, event)


class TransferQueue(ABC):
    """The queue of all loads of a device, or of all its saves."""

    def __init__(self, name: str, n_streams: int, runtime: Runtime, planner: BatchPlanner) -> None:
        self._runtime = runtime
        self._streams = [StagingStream(runtime, planner) for _ in range(n_streams)]
        self._next_streams = cycle(self._streams)
        self._thread = ThreadPoolExecutor(1, f"blendhub-{name}")

    def start(self, arena: HostArena, mover: Mover, batches: Iterable[Batch]) -> StreamTransfer:
        """Run the batches of a group's mover after the engine's work that they must follow."""
        self._runtime.enter()
        return StreamTransfer(self._runtime, self._thread.submit(self._submit, self._begin(), arena, mover, batches))

    def drain(self) -> None:
        """Return when no transfer is pending."""
        self._thread.submit(self._synchronize).result()

    def close(self) -> None:
        self.drain()
        self._thread.shutdown()

    def _submit(self, begin: Any, arena: HostArena, mover: Mover, batches: Iterable[Batch]) -> Submitted:
        """Submit all batches, on the streams in turn."""
        pages_done: dict[StagingStream, Any] = {}
        try:
            self._runtime.enter()
            for batch in batches:
                stream = next(self._next_streams)
                if stream not in pages_done:
                    self._runtime.wait_event(stream.handle, begin)
                pages_done[stream] = self._submit_batch(stream, batch, arena, mover)
            for stream in pages_done:
                self._finish_batch(stream)
            ends = [self._runtime.record_event(stream.handle) for stream in pages_done]
            return Submitted(list(pages_done.values()), ends)
        except BaseException as error:
            # After ``wait`` has raised, the caller may use the bytes for something else.
            for stream in self._streams:
                stream.unfinished = None
            with suppress(Exception):  # the first error tells the cause
                self._synchronize()
            if isinstance(error, Exception):
                raise
            # Extension modules may raise others, which would end the thread that waits.
            raise RuntimeError(f"{type(error).__name__}: {error}") from error

    def _begin(self) -> Any:
        """An event that the batches must follow: the end of all work that the engine has submitted so far."""
        return self._runtime.record_event()

    def _synchronize(self) -> None:
        self._runtime.enter()
        _synchronize_all(self._runtime, [self._runtime.record_event(stream.handle) for stream in self._streams])

    @abstractmethod
    def _submit_batch(self, stream: StagingStream, batch: Batch, arena: HostArena, mover: Mover) -> Any:
        """Submit the copies and the mover's work of the batch to the stream; returns an event behind the latter."""

    def _finish_batch(self, stream: StagingStream) -> None:  # noqa: B027 (the host's part of a load comes first)
        """Do the host's part of the stream's last batch."""


class LoadTransferQueue(TransferQueue):
    _step_begins: Any = None

    def begin_step(self) -> None:
        """Let loads that start from now on follow the engine's work up to here, and not the work of the step itself."""
        self._runtime.enter()
        self._step_begins = self._runtime.record_event()

    def _begin(self) -> Any:
        return super()._begin() if self._step_begins is None else self._step_begins

    def _submit_batch(self, stream: StagingStream, batch: Batch, arena: HostArena, mover: Mover) -> Any:
        table = stream.table_pair(stream.table, batch)
        if batch.source:
            source = stream.table_pair(stream.source_table, batch.source)
            self._runtime.copy(stream.handle, [table, source])
            self._runtime.launch(stream.handle, mover.pages_to_rows, stream.staging, source[0], batch.source)
            self._runtime.launch(stream.handle, mover.rows_to_pages, stream.staging, table[0], batch)
            return self._runtime.record_event(stream.handle)
        are_pinned = _are_pinned(batch, arena)
        slices = stream.staging_and_arena(batch, arena) if are_pinned else ()
        self._runtime.copy(stream.handle, [table, *slices])
        if not are_pinned:
            stream.wait_for_bounce_copy()
            target = stream.bounce_buffer.numpy()
            for piece in batch.slices:
                target[piece.staged] = arena.bytes[piece.stored]
            stream.copy_bounce_buffer(batch, to_staging=True)
        memory = stream.staging if batch.slices else arena.tensor
        self._runtime.launch(stream.handle, mover.rows_to_pages, memory, table[0], batch)
        return self._runtime.record_event(stream.handle)


class SaveTransferQueue(TransferQueue):
    def _submit_batch(self, stream: StagingStream, batch: Batch, arena: HostArena, mover: Mover) -> Any:
        self._finish_batch(stream)
        table = stream.table_pair(stream.table, batch)
        self._runtime.copy(stream.handle, [table])
        memory = stream.staging if batch.slices else arena.tensor
        self._runtime.launch(stream.handle, mover.pages_to_rows, memory, table[0], batch)
        pages_read = self._runtime.record_event(stream.handle)
        if not _are_pinned(batch, arena):
            stream.copy_bounce_buffer(batch, to_staging=False)
            stream.unfinished = batch, arena
        elif batch.slices:
            pairs = stream.staging_and_arena(batch, arena)
            self._runtime.copy(stream.handle, [(target, source) for source, target in pairs])
        return pages_read

    def _finish_batch(self, stream: StagingStream) -> None:
        """Copy the rows that have arrived in the bounce buffer to the arena."""
        if stream.unfinished is None:
            return
        (batch, arena), stream.unfinished = stream.unfinished, None
        stream.wait_for_bounce_copy()
        source = stream.bounce_buffer.numpy()
        for piece in batch.slices:
            arena.bytes[piece.stored] = source[piece.staged]


def _synchronize_all(runtime: Runtime, events: Iterable[Any]) -> None:
    """Wait for each event, also after one has failed; then raise the first error."""
    errors: list[Exception] = []
    for event in events:
        try:
            runtime.synchronize(event)
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _are_pinned(batch: Batch, arena: HostArena) -> bool:
    return all(arena.is_pinned(piece.at + piece.nbytes) for piece in batch.slices)
