"""The contract of a device, which copies KV between the engine's pages and the arena's slots."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from blendhub.contracts.attention import AttentionRules, ChosenAttention
from blendhub.core.layout import ITEM_SIZES, KVLayout
from blendhub.core.spans import Position, Span

if TYPE_CHECKING:
    import torch

PageFormat = Literal["packed_heads", "packed_transposed", "packed_tiles", "split", "latent"]
"""The memory layout of one layer's pages. B blocks, H heads, T tokens a block, Dk and Dv the widths of key and value:

=================  ==========================================================================================
packed_heads       one tensor [B, H, T, Dk + Dv]; the last axis has the key first, then the value
packed_transposed  one tensor [B, H, T * (Dk + Dv)]: the block's keys as [Dk, T], then its values as [T, Dv]
packed_tiles       one tensor [B, H, T * (Dk + Dv)]: the block's keys as [T / 16, Dk / 2, 16, 2], then its values as
                   [Dv / 16, T / 2, 16, 2]: keys have 16 tokens by pairs of items, values 16 items by pairs of tokens
split              two tensors, keys [B, T, H, Dk] and values [B, T, H, Dv]
latent             one tensor [B, T, L]: one vector for each token, which is both key and value (MLA)
=================  ==========================================================================================

Tensors may have any strides, such as those of views of a larger allocation; the last axis is contiguous. 8-bit items
may be in tensors of bytes.
"""


class Rotation(msgspec.Struct, frozen=True, eq=False):
    """The rotary embedding of a layer's keys."""

    cos_sin: "torch.Tensor"
    """float32 ``[positions, width]``: cosines of ``width // 2`` angles, then their sines, with the model's scale.
    It may be a view of a wider table."""
    neox: bool
    """True: items of the first half of the rotated part are paired with those of the second; False: neighbours are."""
    offset: int = 0
    """The first item of the rotated part of a key; items outside it are not rotated. MLA rotates the last part."""


class PagedLayer(msgspec.Struct, frozen=True, eq=False):
    """The pages of one attention layer, as the engine allocated them."""

    name: str
    format: PageFormat
    tensors: tuple["torch.Tensor", ...]
    rotation: Rotation | None = None
    """None: the keys of this layer do not depend on their position."""


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """Tokens ``span`` of a prompt, and the place of their KV in the arena."""

    span: Span
    shard: Position
    """Byte offset in the arena of the group's section of this rank's shard of the chunk, a multiple of the item size;
    with one group, of the shard itself."""
    row: Position
    """The row of the section that holds the span's first token."""
    source_start: Position
    """The position that the span's first key is stored for. Unless it is ``span.start``, the keys are rotated."""


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


class Device(ABC):
    """Copies KV between an engine's pages and the arena.

    *Shards.* A slot of the arena holds one chunk. This rank's shard of it has a section for each group of layers, laid
    out as ``KVLayout`` says, and ``Segment.shard`` is where it begins.

    *Groups.* Layers whose shape or whose block table differs are attached as groups. A transfer copies the layers of
    one group, and touches no page of another one.

    *Exactness.* Values are copied bit for bit, and so are keys that stay at their position and keys of layers
    without rotation. Moved keys are rotated by the angle between the two positions: their rotated part, pair by
    pair, with ``cos = (cn*co + sn*so)/(co*co + so*so)`` and ``sin = (sn*co - cn*so)/(co*co + so*so)`` of the old and
    the new row of ``cos_sin``, in float32, rounded once to the cache's dtype. Values too large for an 8-bit
    dtype saturate. The rest of a moved key stays bit for bit.

    *Writes.* ``load`` writes the tokens of its segments from position ``skip_prefix_n_tokens`` on, and nothing else.
    Other requests may be reading the skipped prefix, holes, the rest of a block and other blocks: a load does not
    write them, not even with equal values. ``save`` writes the rows of its segments and nothing else.

    *Order.* A save sees the engine's writes to its pages that were submitted before the call; a load overwrites those
    that were submitted before the last ``begin_step``. The engine's work that is submitted after ``wait`` returned sees
    the transfer. Until then the caller lets nothing change either side. Several transfers may be pending. ``wait``
    blocks the calling thread, because leases are released after it; a caller that must not block polls ``done``.

    *Threads.* Any thread may make any call, inside torch's inference mode or outside of it. One call is made at a time.

    *Errors.* A segment beyond its shard, the arena, the block table, the pages or the rotation's positions raises
    InvalidInput, and nothing is copied. So do overlapping segments of one load, a save to a read-only arena, and any
    copy before ``attach`` and ``pin`` or after ``close``.
    """

    torch_type: str = "cpu"
    """The torch device type of the engine's pages."""

    formats: tuple[PageFormat, ...] = get_args(PageFormat)
    """The page formats that this device supports."""

    dtypes: tuple[str, ...] = tuple(ITEM_SIZES)
    """The dtypes that this device supports."""

    block_tokens: int
    """The number of neighbouring tokens that should be recomputed together on this device."""

    overlaps_compute: bool = True
    """Whether transfers run beside the engine's computation, as those of a DMA engine do. False: they use the engine's
    cores, and the engine waits for them, because both end sooner than when they share the cores."""

    @abstractmethod
    def attach(self, layers: Sequence[PagedLayer], block_size: int, layout: KVLayout) -> None:
        """Use these pages of the engine, in the model's layer order: a group of layers of one shape, which share a
        block table. Called once for each group, before any transfer; groups are numbered in the order of the calls.

        Raises LayoutMismatch for pages that contradict ``layout``, and for longer chunks than those of the first
        group. Raises Unsupported for a format or dtype that this device does not support, for pages on another
        device than those before, and for an accelerator that refuses the work, for example for want of memory.
        Raises InvalidInput after ``close``. Kernels of every kind are compiled before it returns.
        """

    @abstractmethod
    def pin(self, arena: npt.NDArray[np.uint8], progress: Callable[[], ArenaProgress] | None = None) -> None:
        """Use this arena, and pin its memory if that makes copies faster. Replaces an earlier arena.

        Returns at once: pinning takes minutes on large machines, and copies do not wait for it. ``progress`` says how
        far the arena is reserved by now: what lies behind that is not pinned yet. Any thread may ask it, until nothing
        is ``left``. None: all of it is reserved.

        Raises InvalidInput for anything but a flat array of bytes, and after ``close``.
        """

    @abstractmethod
    def load(
        self,
        segments: Sequence[Segment],
        block_ids: npt.NDArray[np.int64],
        skip_prefix_n_tokens: int = 0,
        group: int = 0,
    ) -> Transfer:
        """Copy from the arena to a group's pages. Block ``block_ids[i]`` has the tokens from ``i * block_size`` on.

        Raises InvalidInput for a group that is not attached, as ``save`` does.
        """

    def begin_step(self) -> None:  # noqa: B027  a device whose loads need no order ignores it
        """The engine begins a step. Its work from now on touches no page of a load that is started before the next one.

        So loads need not follow this work: those of accelerators run beside the step's forward, even if they are
        started after it was launched. Before the first call, a load follows all that was submitted before it.
        """

    @abstractmethod
    def save(self, segments: Sequence[Segment], block_ids: npt.NDArray[np.int64], group: int = 0) -> Transfer:
        """Copy from a group's pages to the arena. Keys are not rotated, and ``source_start`` is ignored."""

    def attention(self, rules: Sequence[AttentionRules], dtype: "torch.dtype") -> ChosenAttention | None:
        """Attention over the attached pages by the rules of each layer, for queries of this dtype. None: the device has
        none, and the engine's own serves.

        Raises Unsupported where several groups are attached, and for rules that it cannot follow. Kernels of every kind
        are compiled before it returns.
        """
        return None

    @abstractmethod
    def close(self) -> None:
        """Wait for pending transfers, and release arena and pages. May be called twice."""
