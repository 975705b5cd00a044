"""The contract of a device, which copies KV between the engine's pages and the arena's slots."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from blendhub.contracts.attention import AttentionRules, ChosenAttention
from blendhub.contracts.pages import PagedLayer, PageFormat, check_pages
from blendhub.contracts.segments import PageSegment, Segment, TransferBounds, after_prefix
from blendhub.core.errors import BrokenContract, InvalidInput, LayoutMismatch, Unsupported
from blendhub.core.layout import ITEM_SIZES, KVLayout

if TYPE_CHECKING:
    import torch


class ArenaProgress(NamedTuple):
    """How far the hub has reserved an arena, from its beginning on. Only reserved bytes may be touched."""

    reserved: int
    """Bytes that can be used."""
    goal: int
    """Bytes that will be: less than the arena's size if memory ran out."""

    @property
    def left(self) -> int:
        return max(0, self.goal - self.reserved)


class Transfer(ABC):
    """A pending or finished copy."""

    @abstractmethod
    def done(self) -> bool:
        """Whether the copy has ended, also by failure. Never blocks and never raises."""

    @abstractmethod
    def wait(self) -> None:
        """Block until the bytes have arrived. If the copy failed, every call raises an ``Exception``, of any class.

        After it, nothing of the copy is written any more.
        """

    def release_pages(self) -> None:
        """Let the engine use the pages for something else: its work that the calling thread submits from now on begins
        after the copy's last access to them. Raises like ``wait``.

        This default waits for the whole copy. Where the engine's work has a stream, the stream should wait, and not the
        thread.
        """
        self.wait()


class Device(ABC):
    """Copies KV between an engine's pages and the arena.

    An implementation has ``_attach``, ``_pin``, ``_load``, ``_save`` and ``_close``. The methods without underscore,
    which are called, check the arguments first, so that these five need not.

    *Shards.* A slot of the arena holds one chunk. This rank's shard of it has a section for each group of layers, laid
    out as ``KVLayout`` says, and ``Segment.shard`` is where it begins.

    *Sources.* A load takes each segment from a shard of the arena, or from blocks of the group's own pages: a
    ``PageSegment``. Both come to the same bits. The blocks that a load reads and those that it writes are others.

    *Groups.* Layers whose shape or whose block table differs are attached as groups, and so are layers that the adapter
    reads before the others. A transfer copies the layers of one group, and touches no page of another one.

    *Exactness.* Values are copied bit for bit, and so are keys that stay at their position and keys of layers
    without rotation. Moved keys are rotated by the angle between the two positions: their rotated part, pair by
    pair, with ``cos = (cn*co + sn*so)/(co*co + so*so)`` and ``sin = (sn*co - cn*so)/(co*co + so*so)`` of the old and
    the new row of ``cos_sin``, in float32, rounded once to the cache's dtype. Values too large for an 8-bit
    dtype saturate. The rest of a moved key stays bit for bit.

    *Writes.* ``load`` writes the tokens of its segments from position ``skip_prefix_n_tokens`` on, and nothing else.
    Other requests may be reading the skipped prefix, holes, the rest of a block and other blocks: a load does not
    write them, not even with equal values. ``save`` writes the rows of its segments and nothing else.

    *Order.* The engine submits its work to an accelerator and does not wait for it. A save reads the pages after all
    work that the engine submitted before the call of ``save``. A load reads and writes them after all work that the
    engine submitted before the last ``begin_step``. The engine's work that is submitted after ``wait`` returned sees
    the transfer. Before that, the caller changes neither the rows that the transfer copies, nor the pages that it reads
    or writes, unless it has called ``release_pages``. Several transfers may be pending. ``wait`` blocks the calling
    thread, because leases are released after it; a caller that must not block polls ``done``.

    *Threads.* Any thread may make any call, inside torch's inference mode or outside of it. One call is made at a time.

    *Errors.* A segment beyond its shard, the arena, the block table, the pages or the rotation's positions raises
    InvalidInput, and nothing is copied. So do overlapping segments of one load, a block that it reads and writes, a
    save to a read-only arena, a group that is not attached, and any copy before ``attach`` and ``pin`` or after
    ``close``.
    """

    torch_type: str = "cpu"
    """The torch device type of the engine's pages."""

    formats: tuple[PageFormat, ...] = get_args(PageFormat)
    """The page formats that this device supports."""

    dtypes: tuple[str, ...] = tuple(ITEM_SIZES)
    """The dtypes that this device supports."""

    block_tokens: int
    """The number of neighbouring tokens that the engine's own attention computes on this device in about the time of
    one, because they share a tile of its kernel; 1: single tokens cost no more."""

    overlaps_compute: bool = True
    """Whether transfers run beside the engine's computation, as those of a DMA engine do. False: they use the engine's
    cores, and the engine waits for them, because both end sooner than when they share the cores."""

    _bounds: tuple[TransferBounds, ...] = ()
    """Those of each attached group."""
    _pinned: npt.NDArray[np.uint8] | None = None
    _is_closed: bool = False

    def attach(self, layers: Sequence[PagedLayer], block_size: int, layout: KVLayout) -> None:
        """Use these pages of the engine, in the model's layer order: a group of layers of one shape, which share a
        block table. Called once for each group, before any transfer; groups are numbered in the order of the calls.

        Raises LayoutMismatch for pages that contradict ``layout``, and for longer chunks than those of the first
        group. Raises Unsupported for a format or dtype that this device does not support, for pages on another
        device than those before, and for an accelerator that refuses the work, for example for want of memory.
        Raises InvalidInput after ``close``. Kernels of every kind are compiled before it returns.
        """
        import torch

        self._require_open()
        if layout.dtype not in self.dtypes:
            raise Unsupported(
                f"{_name(self)} does not support KV of {layout.dtype}; it supports {', '.join(self.dtypes)}: "
                "leave out --kv-cache-dtype, and serve a model without quantised KV"
            )
        check_pages(layers, block_size, layout, self.formats)
        bounds = TransferBounds(layers, block_size, layout)
        for first in self._bounds[:1]:
            if bounds.place != first.place:
                raise Unsupported(f"pages lie on {bounds.place} and on {first.place}; they must lie on one device")
            if layout.chunk_tokens > first.layout.chunk_tokens:
                raise LayoutMismatch(
                    f"a group of layers has chunks of {layout.chunk_tokens} tokens, and the first group of "
                    f"{first.layout.chunk_tokens}"
                )
        # Tensors that are made inside of inference mode could not be written outside of it.
        with torch.inference_mode(False):
            self._attach(layers, block_size, layout)
        self._bounds = (*self._bounds, bounds)

    def pin(self, arena: npt.NDArray[np.uint8], progress: Callable[[], ArenaProgress] | None = None) -> None:
        """Use this arena, and pin its memory if that makes copies faster. Replaces an earlier arena.

        Returns at once: pinning takes minutes on large machines, and copies do not wait for it. ``progress`` says how
        far the arena is reserved by now: what lies behind that is not pinned yet. Any thread may ask it, until nothing
        is ``left``. None: all of it is reserved.

        Raises InvalidInput for anything but a flat array of bytes, and after ``close``.
        """
        import torch

        self._require_open()
        if arena.dtype != np.uint8 or arena.ndim != 1 or not arena.flags.c_contiguous:
            raise InvalidInput(f"an arena is a flat array of bytes, got {arena.dtype} of shape {arena.shape}")
        with torch.inference_mode(False):
            self._pin(arena, progress)
        self._pinned = arena

    def load(
        self,
        segments: Sequence[Segment | PageSegment],
        block_ids: npt.NDArray[np.int64],
        skip_prefix_n_tokens: int = 0,
        group: int = 0,
    ) -> Transfer:
        """Copy from the arena, or from other blocks, to a group's pages.

        Block ``block_ids[i]`` has the tokens from ``i * block_size`` on.
        """
        bounds, arena = self._ready(group)
        bounds.check(segments, block_ids, arena.size)
        bounds.check_load(segments, block_ids, skip_prefix_n_tokens)
        return self._transfer(self._load(after_prefix(segments, skip_prefix_n_tokens), block_ids, group))

    def begin_step(self) -> None:  # noqa: B027  a device whose loads need no order ignores it
        """The engine begins a step, whose work touches no page of a load that starts before the next ``begin_step``.

        So these loads need not wait for the step's work: on an accelerator they run beside the step's forward, even if
        they start after it was launched. Before the first ``begin_step``, a load waits for all work that the engine has
        submitted.
        """

    def save(self, segments: Sequence[Segment], block_ids: npt.NDArray[np.int64], group: int = 0) -> Transfer:
        """Copy from a group's pages to the arena. Keys are not rotated, and ``source_start`` is ignored."""
        bounds, arena = self._ready(group)
        bounds.check(segments, block_ids, arena.size)
        if not arena.flags.writeable:
            raise InvalidInput("the arena is read-only, so nothing can be saved; pin a writable one")
        return self._transfer(self._save(after_prefix(segments, 0), block_ids, group))

    def attention(
        self, rules: Sequence[AttentionRules], dtype: "torch.dtype", group: int = 0
    ) -> ChosenAttention | None:
        """Attention over the pages of a group by the rules of each of its layers, for queries of this dtype. None: the
        device has none, and the engine's own serves. A probe attends to readable keys and to its tokens' own, and adds
        up what each receives.

        Raises Unsupported for rules that it cannot follow, and InvalidInput for a group that is not attached. Kernels
        of every kind are compiled before it returns.
        """
        return None

    def close(self) -> None:
        """Wait for pending transfers, and release arena and pages. May be called twice."""
        if not self._is_closed:
            self._is_closed, self._pinned = True, None
            self._close()

    @abstractmethod
    def _attach(self, layers: Sequence[PagedLayer], block_size: int, layout: KVLayout) -> None:
        """Attach a group of layers."""

    @abstractmethod
    def _pin(self, arena: npt.NDArray[np.uint8], progress: Callable[[], ArenaProgress] | None) -> None:
        """Use this arena, which may come before the first group."""

    @abstractmethod
    def _load(
        self, segments: Sequence[Segment | PageSegment], block_ids: npt.NDArray[np.int64], group: int
    ) -> Transfer:
        """Load these segments, none of which is empty; the prefix that is skipped is cut off."""

    @abstractmethod
    def _save(self, segments: Sequence[Segment], block_ids: npt.NDArray[np.int64], group: int) -> Transfer:
        """Save these segments, none of which is empty."""

    @abstractmethod
    def _close(self) -> None:
        """Called once. The device may be attached to nothing."""

    def _require_open(self) -> None:
        if self._is_closed:
            raise InvalidInput(f"{_name(self)} is closed; create another one")

    def _ready(self, group: int) -> tuple[TransferBounds, npt.NDArray[np.uint8]]:
        self._require_open()
        if not self._bounds or self._pinned is None:
            raise InvalidInput(f"{_name(self)} needs attach and pin before it can copy")
        if not 0 <= group < len(self._bounds):
            raise InvalidInput(f"there is no group {group} of layers: {len(self._bounds)} are attached")
        return self._bounds[group], self._pinned

    def _transfer(self, transfer: object) -> Transfer:
        if not isinstance(transfer, Transfer):
            raise BrokenContract(f"{_name(self)} should return a Transfer for a copy, got {transfer!r:.100}")
        return transfer


def _name(device: Device) -> str:
    return f"device {type(device).__module__}.{type(device).__qualname__}"
