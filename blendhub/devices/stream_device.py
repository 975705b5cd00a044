"""The base of devices with streams: staging, the arena, and the two queues of transfers."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from blendhub.contracts import ArenaProgress, Device, PagedLayer, PageSegment, Segment, Transfer
from blendhub.core.errors import BlendHubError, InvalidInput, Unsupported
from blendhub.core.layout import KVLayout
from blendhub.devices.batches import BatchPlanner
from blendhub.devices.host_arena import HostArena, PinningThread
from blendhub.devices.pages import Pages, read_pages
from blendhub.devices.queues import LoadTransferQueue, Mover, SaveTransferQueue, TransferQueue
from blendhub.devices.runtime import Runtime

ACCESS_BYTES = 16
"""Kernels read and write rows of the arena itself only where these begin at a multiple of their widest access."""

MAX_SLOTS = 2**31


class _Group(NamedTuple):
    """A group of layers."""

    pages: Pages
    planner: BatchPlanner
    mover: Mover


class _Attached(NamedTuple):
    """The state that the first ``attach`` creates and ``close`` drops. Groups share staging, streams and threads."""

    groups: list[_Group]
    runtime: Runtime
    loads: LoadTransferQueue
    saves: SaveTransferQueue
    pinning: PinningThread


class StreamDevice(Device):
    """A device whose work all goes through a ``Runtime``. Subclasses say how a batch gets to pages and back."""

    name: ClassVar[str]
    """The name in configurations."""
    streams_per_queue: ClassVar[int]
    reaches_arena: ClassVar[bool] = False
    """Whether the mover takes rows in the arena itself, where the runtime's kernels reach it."""

    def __init__(self, staging_mib: float, block_tokens: int, runtime: Callable[[torch.device], Runtime]) -> None:
        self.block_tokens = block_tokens
        self._staging_mib = staging_mib
        self._runtime = runtime
        self._attached: _Attached | None = None
        self._arena: tuple[npt.NDArray[np.uint8], Callable[[], ArenaProgress] | None] | None = None
        """The arguments of ``pin``, which may come before ``attach``."""
        self._host_arena: HostArena | None = None

    @abstractmethod
    def _mover(self, pages: Pages, layout: KVLayout, block_size: int) -> Mover:
        """The mover between rows of this layout and these pages. Kernels are compiled when it returns."""

    def wait_until_pinned(self) -> None:
        """Return when as much of the arena is pinned as can be. For tests and benchmarks: transfers do not need it."""
        assert self._attached
        self._attached.pinning.wait()

    def begin_step(self) -> None:
        if self._attached:
            self._attached.loads.begin_step()

    def _attach(self, layers: Sequence[PagedLayer], block_size: int, layout: KVLayout) -> None:
        pages = read_pages(layers, block_size, layout)
        if pages.n_blocks * block_size >= MAX_SLOTS:
            raise Unsupported(
                f"{pages.n_blocks} blocks of {block_size} tokens are too many: device {self.name!r} numbers slots with "
                "32 bits; lower --gpu-memory-utilization"
            )
        planner = self._planner(layout, block_size)
        try:
            attached = self._attached or self._set_up(pages, planner)
            attached.runtime.enter()
            mover = self._mover(pages, layout, block_size)
        except BlendHubError:
            raise
        except Exception as error:
            raise Unsupported(
                f"device {self.name!r} cannot be set up on {pages.place}: {type(error).__name__}: {error}; "
                "`blendhub plugins` says what it needs"
            ) from error
        attached.groups.append(_Group(pages, planner, mover))
        is_first, self._attached = self._attached is None, attached
        if is_first:
            self._use_arena()

    def _pin(self, arena: npt.NDArray[np.uint8], progress: Callable[[], ArenaProgress] | None) -> None:
        self._release_arena()
        self._arena = arena, progress
        self._use_arena()

    def _load(
        self, segments: Sequence[Segment | PageSegment], block_ids: npt.NDArray[np.int64], group: int
    ) -> Transfer:
        assert self._attached
        return self._start(self._attached.loads, segments, block_ids, group)

    def _save(self, segments: Sequence[Segment], block_ids: npt.NDArray[np.int64], group: int) -> Transfer:
        assert self._attached
        return self._start(self._attached.saves, segments, block_ids, group)

    def _close(self) -> None:
        self._release_arena()
        if self._attached:
            self._attached.pinning.close()
            self._attached.loads.close()
            self._attached.saves.close()
        self._attached = None

    def _set_up(self, pages: Pages, planner: BatchPlanner) -> _Attached:
        """Allocate staging, of which each stream has as much for every group."""
        runtime = self._runtime(pages.place)
        runtime.enter()
        queue = self.streams_per_queue, runtime, planner
        return _Attached(
            [],
            runtime,
            LoadTransferQueue(f"{self.name}-loads", *queue),
            SaveTransferQueue(f"{self.name}-saves", *queue),
            PinningThread(self.name),
        )

    def _start(
        self,
        queue: TransferQueue,
        segments: Sequence[Segment | PageSegment],
        block_ids: npt.NDArray[np.int64],
        number: int,
    ) -> Transfer:
        assert self._attached and self._host_arena
        group, runtime, arena = self._attached.groups[number], self._attached.runtime, self._host_arena
        shard_bytes = group.planner.layout.shard_bytes

        def reaches(shard: int) -> bool:
            return (
                self.reaches_arena
                and runtime.kernels_reach_registered_memory
                and arena.is_pinned(shard + shard_bytes)
                and (arena.bytes.ctypes.data + shard) % ACCESS_BYTES == 0
            )

        # The caller may change the block table after the call, while the queue's thread reads it.
        return queue.start(arena, group.mover, group.planner.batches(segments, block_ids.copy(), reaches))

    def _planner(self, layout: KVLayout, block_size: int) -> BatchPlanner:
        n_streams = 2 * self.streams_per_queue
        longest = self._attached.groups[0].planner.layout.chunk_tokens if self._attached else None
        planner = BatchPlanner(layout, block_size, int(self._staging_mib * 2**20) // n_streams // 256 * 256, longest)
        if planner.staging_bytes < planner.layer_bytes:
            needed = n_streams * (planner.table_bytes + planner.layer_bytes + 256) / 2**20
            raise InvalidInput(
                f"staging_mib = {self._staging_mib:g} is too little: one part in {n_streams} of it must hold the "
                f"{planner.layer_bytes} bytes that one layer keeps of a chunk; set it to {needed:.3g} or more"
            )
        return planner

    def _use_arena(self) -> None:
        if self._attached and self._arena:
            arena, progress = self._arena
            self._host_arena = HostArena(arena, self._attached.runtime, progress)
            self._attached.pinning.run_later(self._host_arena.pin)

    def _release_arena(self) -> None:
        """Have the arena unpinned when no transfer is pending."""
        if self._attached and self._host_arena:
            self._host_arena.stop_pinning()
            for work in (self._attached.loads.drain, self._attached.saves.drain, self._host_arena.unpin):
                self._attached.pinning.run_later(work)
        self._arena = self._host_arena = None

    def _pages_of(self, number: int) -> tuple[Pages, KVLayout]:
        """The pages of a group, for attention over them."""
        groups = self._attached.groups if self._attached else []
        if not 0 <= number < len(groups):
            raise InvalidInput(f"there is no group {number} of layers to attend to: {len(groups)} are attached")
        return groups[number].pages, groups[number].planner.layout
