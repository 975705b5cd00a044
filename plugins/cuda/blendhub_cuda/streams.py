"""Queues of transfers: two streams for loads and two for saves, so that one's bus copy overlaps the other's kernel.

Each stream has its own staging. Everything that touches a stream's staging runs in that stream, in order. So only
the two ends of a transfer need events: it begins after the engine's earlier work, and has ended when its streams have
reached their events.

A thread of the queue submits the work. A long transfer takes thousands of calls, which would delay the engine's
thread, and block it once the GPU's launch queue is full.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import cycle
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from blendhub.contracts import Transfer
from blendhub.devices import Runtime
from blendhub_cuda.launcher import Launcher
from blendhub_cuda.runtime import HostArena
from blendhub_cuda.tiles import Batch, BatchGroup, BatchPlanner, Slice

STREAMS_PER_QUEUE = 2

Bytes = npt.NDArray[np.uint8]


class StagingStream:
    """A stream with device memory for one table of tiles and for the slices of one batch."""

    def __init__(self, runtime: Runtime, planner: BatchPlanner) -> None:
        self.handle = runtime.create_stream()
        memory = runtime.allocate(planner.table_bytes + planner.staging_bytes)
        self.table, self.staging = memory.split([planner.table_bytes, planner.staging_bytes])
        self._runtime = runtime
        self._bounce_buffer: torch.Tensor | None = None
        self._bounce_copied: Any = None
        self.group: BatchGroup | None = None
        """The group whose tiles ``table`` holds."""
        self.unfinished: tuple[Batch, HostArena] | None = None
        """A saved batch that the host has yet to copy from the bounce buffer to the arena."""

    @property
    def bounce_buffer(self) -> torch.Tensor:
        """Pinned memory of the size of ``staging``, for arenas that are not pinned."""
        if self._bounce_buffer is None:
            self._bounce_buffer = self._runtime.allocate_pinned(len(self.staging))
        return self._bounce_buffer

    def wait_for_bounce_copy(self) -> None:
        """Return when the copy between the bounce buffer and staging has ended."""
        if self._bounce_copied is not None:
            self._runtime.synchronize(self._bounce_copied)
            self._bounce_copied = None

    def record_bounce_copy(self) -> None:
        """Remember the end of the copy between the bounce buffer and staging that was just submitted."""
        self._bounce_copied = self._runtime.record_event(self.handle)


class CudaTransfer(Transfer):
    def __init__(self, runtime: Runtime, submitted: "Future[list[Any]]") -> None:
        self._runtime = runtime
        self._submitted = submitted

    def done(self) -> bool:
        if not self._submitted.done():
            return False
        return self._submitted.exception() is not None or all(map(self._runtime.query, self._submitted.result()))

    def wait(self) -> None:
        for event in self._submitted.result():
            self._runtime.synchronize(event)


class TransferQueue(ABC):
    """All loads of a device, or all its saves."""

    def __init__(self, name: str, runtime: Runtime, launcher: Launcher, planner: BatchPlanner) -> None:
        self._runtime = runtime
        self._launcher = launcher
        self._planner = planner
        self._streams = [StagingStream(runtime, planner) for _ in range(STREAMS_PER_QUEUE)]
        self._next_streams = cycle(self._streams)
        self._thread = ThreadPoolExecutor(1, f"blendhub-cuda-{name}")

    def warm_up(self) -> None:
        """Launch the kernel without tokens, which compiles it before the first request."""
        stream, group = self._streams[0], self._planner.empty_group
        self._launch(stream, stream.staging.data_ptr(), group, group.batches[0])

    def start(self, arena: HostArena, groups: Iterable[BatchGroup]) -> CudaTransfer:
        """Run the batches after all work that the engine has submitted so far."""
        begin = self._runtime.record_event()
        return CudaTransfer(self._runtime, self._thread.submit(self._submit, begin, arena, groups))

    def drain(self) -> None:
        """Return when no transfer is pending."""
        self._thread.submit(self._synchronize).result()

    def close(self) -> None:
        self.drain()
        self._thread.shutdown()

    def _submit(self, begin: Any, arena: HostArena, groups: Iterable[BatchGroup]) -> list[Any]:
        """Submit all batches, alternating between the streams; returns an event for the end of each used stream."""
        used: list[StagingStream] = []
        try:
            for group in groups:
                table = self._launcher.table(group)
                for batch, stream in zip(group.batches, self._next_streams, strict=False):
                    if stream not in used:
                        used.append(stream)
                        self._runtime.wait_event(stream.handle, begin)
                    if stream.group is not group:
                        stream.group = group
                        self._runtime.copy(stream.handle, stream.table[: len(table)], table)
                    self._submit_batch(stream, group, batch, arena)
            for stream in used:
                self._finish_batch(stream)
            return [self._runtime.record_event(stream.handle) for stream in used]
        except BaseException:
            # After ``wait`` has raised, the caller may use the bytes for something else.
            for stream in self._streams:
                stream.group = stream.unfinished = None
            self._synchronize()
            raise

    def _synchronize(self) -> None:
        for stream in self._streams:
            self._runtime.synchronize(self._runtime.record_event(stream.handle))

    @abstractmethod
    def _launch(self, stream: StagingStream, base: int, group: BatchGroup, batch: Batch) -> None:
        """Launch the queue's kernel on the slices or shards at ``base``."""

    @abstractmethod
    def _submit_batch(self, stream: StagingStream, group: BatchGroup, batch: Batch, arena: HostArena) -> None:
        """Submit the copies and the kernel of the batch to the stream."""

    @abstractmethod
    def _finish_batch(self, stream: StagingStream) -> None:
        """Do the host's part of the stream's last batch."""

    def _staging_slices(self, batch: Batch, memory: torch.Tensor) -> list[torch.Tensor]:
        """The batch's slices in staging, or in a bounce buffer of the same layout."""
        nbytes = batch.n_layers * self._planner.layer_bytes
        return [memory[one.staging_at : one.staging_at + nbytes] for one in batch.slices]

    def _arena_slices(self, batch: Batch, arena: Any) -> list[Any]:
        """The batch's slices in the arena, which is given as a tensor or an array."""
        nbytes = batch.n_layers * self._planner.layer_bytes
        return [arena[one.at : one.at + nbytes] for one in batch.slices]


class LoadQueue(TransferQueue):
    def _launch(self, stream: StagingStream, base: int, group: BatchGroup, batch: Batch) -> None:
        self._launcher.rows_to_pages(stream.handle, base, stream.table, group, batch)

    def _submit_batch(self, stream: StagingStream, group: BatchGroup, batch: Batch, arena: HostArena) -> None:
        if not batch.slices:
            self._launch(stream, arena.address, group, batch)
            return
        if arena.is_registered:
            sources = self._arena_slices(batch, arena.tensor)
        else:
            sources = self._fill_bounce_buffer(stream, batch, arena)
        for target, source in zip(self._staging_slices(batch, stream.staging), sources, strict=True):
            self._runtime.copy(stream.handle, target, source)
        if not arena.is_registered:
            stream.record_bounce_copy()
        self._launch(stream, stream.staging.data_ptr(), group, batch)

    def _finish_batch(self, stream: StagingStream) -> None:
        """Nothing: the host's part of a load comes before its copies."""

    def _fill_bounce_buffer(self, stream: StagingStream, batch: Batch, arena: HostArena) -> list[torch.Tensor]:
        """The batch's slices, copied from the arena to the bounce buffer."""
        stream.wait_for_bounce_copy()
        slices = self._staging_slices(batch, stream.bounce_buffer)
        for target, source in zip(slices, self._arena_slices(batch, arena.bytes), strict=True):
            np.copyto(target.numpy(), source)
        return slices


class SaveQueue(TransferQueue):
    def _launch(self, stream: StagingStream, base: int, group: BatchGroup, batch: Batch) -> None:
        self._launcher.pages_to_rows(stream.handle, base, stream.table, group, batch)

    def _submit_batch(self, stream: StagingStream, group: BatchGroup, batch: Batch, arena: HostArena) -> None:
        if not batch.slices:
            self._launch(stream, arena.address, group, batch)
            return
        self._finish_batch(stream)
        self._launch(stream, stream.staging.data_ptr(), group, batch)
        if arena.is_registered:
            targets = self._arena_slices(batch, arena.tensor)
        else:
            targets = self._staging_slices(batch, stream.bounce_buffer)
        for target, source in zip(targets, self._staging_slices(batch, stream.staging), strict=True):
            self._runtime.copy(stream.handle, target, source)
        if not arena.is_registered:
            stream.record_bounce_copy()
            stream.unfinished = batch, arena

    def _finish_batch(self, stream: StagingStream) -> None:
        """Copy the rows that have arrived in the bounce buffer to the arena."""
        if stream.unfinished is None:
            return
        (batch, arena), stream.unfinished = stream.unfinished, None
        stream.wait_for_bounce_copy()
        sources, targets = self._staging_slices(batch, stream.bounce_buffer), self._arena_slices(batch, arena.bytes)
        for one, source, target in zip(batch.slices, sources, targets, strict=True):
            self._copy_rows(one, target.reshape(batch.n_layers, -1), source.numpy().reshape(batch.n_layers, -1))

    def _copy_rows(self, one: Slice, targets: Bytes, sources: Bytes) -> None:
        """Copy the segment's rows of each layer; other rows of the chunk are not part of this save."""
        layout = self._planner.layout
        for at, row_bytes in ((0, layout.key_row_bytes), (layout.values_at(0), layout.value_row_bytes)):
            rows = slice(at + one.row * row_bytes, at + (one.row + one.count) * row_bytes)
            targets[:, rows] = sources[:, rows]
