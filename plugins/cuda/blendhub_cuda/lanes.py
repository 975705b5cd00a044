"""How batches run: in two lanes a direction, so that one's copy over the bus runs beside the other's kernel.

A lane is a stream with staging of its own. All that touches a lane's staging is in its stream, in order; so nothing
can overtake anything there, and only the ends need marks: a transfer begins after what the engine was given before
it, and has ended when its lanes have.

A thread of the direction gives the lanes their work. A long transfer is thousands of calls, which would hold up the
engine, and block it once the GPU's queue is full.
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
from blendhub_cuda.launcher import Launcher
from blendhub_cuda.runtime import PinnedArena, Runtime
from blendhub_cuda.tiles import Batch, Cutter, Slice, Work

N_LANES = 2

Bytes = npt.NDArray[np.uint8]


class Lane:
    def __init__(self, runtime: Runtime, cutter: Cutter) -> None:
        self.stream = runtime.stream()
        memory = runtime.memory(cutter.table_bytes + cutter.room)
        self.table, self.staging = memory.split([cutter.table_bytes, cutter.room])
        self._runtime = runtime
        self._pieces: torch.Tensor | None = None
        self._pieces_end: Any = None
        self.work: Work | None = None
        """Whose tiles its table holds."""
        self.unfinished: tuple[Batch, PinnedArena] | None = None
        """A save whose pieces the host has yet to bring to the arena."""

    @property
    def pieces(self) -> torch.Tensor:
        """Pinned memory of the size of staging, for arenas that are not pinned themselves."""
        if self._pieces is None:
            self._pieces = self._runtime.pinned(len(self.staging))
        return self._pieces

    def await_pieces(self) -> None:
        """Return when the copy between pieces and staging has ended."""
        if self._pieces_end is not None:
            self._runtime.wait(self._pieces_end)
            self._pieces_end = None

    def pieces_are_copied(self) -> None:
        """The stream was given a copy between pieces and staging."""
        self._pieces_end = self._runtime.mark(self.stream)


class CudaTransfer(Transfer):
    def __init__(self, runtime: Runtime, started: "Future[list[Any]]") -> None:
        self._runtime = runtime
        self._started = started

    def done(self) -> bool:
        if not self._started.done():
            return False
        return self._started.exception() is not None or all(map(self._runtime.done, self._started.result()))

    def wait(self) -> None:
        for mark in self._started.result():
            self._runtime.wait(mark)


class Direction(ABC):
    """Loads, or saves."""

    def __init__(self, name: str, runtime: Runtime, launcher: Launcher, cutter: Cutter) -> None:
        self._runtime = runtime
        self._launcher = launcher
        self._cutter = cutter
        self._lanes = [Lane(runtime, cutter) for _ in range(N_LANES)]
        self._turn = cycle(self._lanes)
        self._thread = ThreadPoolExecutor(1, f"blendhub-cuda-{name}")

    def warm_up(self) -> None:
        """Copy nothing, so that compiling holds up the start and not the first request."""
        lane, nothing = self._lanes[0], self._cutter.nothing
        self._launch(lane, lane.staging.data_ptr(), nothing, nothing.batches[0])

    def start(self, arena: PinnedArena, all_work: Iterable[Work]) -> CudaTransfer:
        """Do the work after all that the engine was given by now."""
        begin = self._runtime.mark()
        return CudaTransfer(self._runtime, self._thread.submit(self._run, begin, arena, all_work))

    def drain(self) -> None:
        """Return when nothing is under way."""
        self._thread.submit(self._await_lanes).result()

    def close(self) -> None:
        self.drain()
        self._thread.shutdown()

    def _run(self, begin: Any, arena: PinnedArena, all_work: Iterable[Work]) -> list[Any]:
        used: list[Lane] = []
        try:
            for work in all_work:
                table = self._launcher.table(work)
                for batch, lane in zip(work.batches, self._turn, strict=False):
                    if lane not in used:
                        used.append(lane)
                        self._runtime.follow(lane.stream, begin)
                    if lane.work is not work:
                        lane.work = work
                        self._runtime.copy(lane.stream, lane.table[: len(table)], table)
                    self._begin(lane, work, batch, arena)
            for lane in used:
                self._finish(lane)
            return [self._runtime.mark(lane.stream) for lane in used]
        except BaseException:
            # Who is told of the failure may use the bytes for something else.
            for lane in self._lanes:
                lane.work = lane.unfinished = None
            self._await_lanes()
            raise

    def _await_lanes(self) -> None:
        for lane in self._lanes:
            self._runtime.wait(self._runtime.mark(lane.stream))

    @abstractmethod
    def _launch(self, lane: Lane, base: int, work: Work, batch: Batch) -> None:
        """Run the direction's kernel on what lies at ``base``."""

    @abstractmethod
    def _begin(self, lane: Lane, work: Work, batch: Batch, arena: PinnedArena) -> None:
        """Give the lane all that the batch needs."""

    @abstractmethod
    def _finish(self, lane: Lane) -> None:
        """Do what is left for the host."""

    def _staged(self, batch: Batch, whole: torch.Tensor) -> list[torch.Tensor]:
        """The places of the batch's slices in staging, or in memory like it."""
        nbytes = batch.n_layers * self._cutter.layer_bytes
        return [whole[one.staging_at : one.staging_at + nbytes] for one in batch.slices]

    def _of_arena(self, batch: Batch, whole: Any) -> list[Any]:
        """The places of the batch's slices in the arena."""
        nbytes = batch.n_layers * self._cutter.layer_bytes
        return [whole[one.at : one.at + nbytes] for one in batch.slices]


class Loads(Direction):
    def _launch(self, lane: Lane, base: int, work: Work, batch: Batch) -> None:
        self._launcher.rows_to_pages(lane.stream, base, lane.table, work, batch)

    def _begin(self, lane: Lane, work: Work, batch: Batch, arena: PinnedArena) -> None:
        if not batch.slices:
            self._launch(lane, arena.address, work, batch)
            return
        sources = self._of_arena(batch, arena.tensor) if arena.is_registered else self._pieces(lane, batch, arena)
        for target, source in zip(self._staged(batch, lane.staging), sources, strict=True):
            self._runtime.copy(lane.stream, target, source)
        if not arena.is_registered:
            lane.pieces_are_copied()
        self._launch(lane, lane.staging.data_ptr(), work, batch)

    def _finish(self, lane: Lane) -> None:
        """Nothing: what the host does for a load comes first."""

    def _pieces(self, lane: Lane, batch: Batch, arena: PinnedArena) -> list[torch.Tensor]:
        """The slices, copied to where the GPU can fetch them."""
        lane.await_pieces()
        pieces = self._staged(batch, lane.pieces)
        for piece, source in zip(pieces, self._of_arena(batch, arena.bytes), strict=True):
            np.copyto(piece.numpy(), source)
        return pieces


class Saves(Direction):
    def _launch(self, lane: Lane, base: int, work: Work, batch: Batch) -> None:
        self._launcher.pages_to_rows(lane.stream, base, lane.table, work, batch)

    def _begin(self, lane: Lane, work: Work, batch: Batch, arena: PinnedArena) -> None:
        if not batch.slices:
            self._launch(lane, arena.address, work, batch)
            return
        self._finish(lane)
        self._launch(lane, lane.staging.data_ptr(), work, batch)
        targets = self._of_arena(batch, arena.tensor) if arena.is_registered else self._staged(batch, lane.pieces)
        for target, source in zip(targets, self._staged(batch, lane.staging), strict=True):
            self._runtime.copy(lane.stream, target, source)
        if not arena.is_registered:
            lane.pieces_are_copied()
            lane.unfinished = batch, arena

    def _finish(self, lane: Lane) -> None:
        """Bring pieces that have arrived to the arena."""
        if lane.unfinished is None:
            return
        (batch, arena), lane.unfinished = lane.unfinished, None
        lane.await_pieces()
        pieces, targets = self._staged(batch, lane.pieces), self._of_arena(batch, arena.bytes)
        for one, piece, target in zip(batch.slices, pieces, targets, strict=True):
            self._copy_rows(one, target.reshape(batch.n_layers, -1), piece.numpy().reshape(batch.n_layers, -1))

    def _copy_rows(self, one: Slice, targets: Bytes, sources: Bytes) -> None:
        """The segment's rows of each layer, and nothing else: other rows of the chunk are not ours."""
        layout = self._cutter.layout
        for at, row_bytes in ((0, layout.key_row_bytes), (layout.values_at(0), layout.value_row_bytes)):
            rows = slice(at + one.row * row_bytes, at + (one.row + one.count) * row_bytes)
            targets[:, rows] = sources[:, rows]
