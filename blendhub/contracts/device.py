"""The contract of a device: how KV moves between the engine's pages and the arena's slots."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from blendhub.layout import ITEM_SIZES, KVLayout
from blendhub.plan import Span

if TYPE_CHECKING:
    import torch

PageFormat = Literal["packed_heads", "packed_tokens", "packed_transposed", "kv_first", "split", "latent"]
"""How one layer's pages lie in memory. B blocks, H heads, T tokens a block, Dk and Dv the widths of a key and a value:

=================  ==========================================================================================
packed_heads       one tensor [B, H, T, Dk + Dv]; of the last axis the key comes first, then the value
packed_tokens      one tensor [B, T, H, Dk + Dv]; likewise
packed_transposed  one tensor [B, H, T * (Dk + Dv)]: the block's keys as [Dk, T], then its values as [T, Dv]
kv_first           one tensor [2, B, T, H, D]
split              two tensors, keys [B, T, H, Dk] and values [B, T, H, Dv]
latent             one tensor [B, T, L]: one vector a token, which serves as key and value (MLA)
=================  ==========================================================================================

Tensors may have any strides, as views of a larger allocation have; the last axis is contiguous. Numbers of 8 bits may
be kept in tensors of bytes.
"""


class Rotation(msgspec.Struct, frozen=True, eq=False):
    """How a layer turns its keys with their position."""

    cos_sin: "torch.Tensor"
    """float32 ``[positions, width]``: cosines of ``width // 2`` angles, then their sines, scaled as the model does.
    It may be a part of a wider table."""
    neox: bool
    """True: the first half of the rotated part pairs with the second half; False: neighbours pair."""
    offset: int = 0
    """Where the rotated part starts within a key; what is outside of it does not turn. MLA has it behind the latent."""


class PagedLayer(msgspec.Struct, frozen=True, eq=False):
    """One attention layer's pages, as the engine allocated them."""

    name: str
    format: PageFormat
    tensors: tuple["torch.Tensor", ...]
    rotation: Rotation | None = None
    """None: the keys of this layer do not depend on their position."""


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """Tokens ``span`` of a prompt, and where their KV lies in the arena."""

    span: Span
    shard: int
    """Byte offset in the arena of this rank's shard of the chunk: a multiple of the item's size."""
    row: int
    """Which row of the shard is the span's first token."""
    source_start: int
    """The position for which the span's first key is turned; if it is not ``span.start``, keys are turned anew."""


class Transfer(ABC):
    """A copy under way."""

    @abstractmethod
    def done(self) -> bool:
        """Whether it has ended, well or not. Never blocks."""

    @abstractmethod
    def wait(self) -> None:
        """Return when the bytes have arrived; raises if the copy failed."""


class Device(ABC):
    """Copies KV between an engine's pages and the arena.

    *Shards.* A slot of the arena holds one chunk; this rank's shard of it is laid out as ``KVLayout`` says, and
    ``Segment.shard`` is where it begins.

    *Exactness.* Values are copied bit for bit, and so are keys that stay at their position and keys of layers
    without rotation. Keys that move are turned by the angle between the two positions: their rotated part, pair by
    pair, with ``cos = (cn*co + sn*so)/(co*co + so*so)`` and ``sin = (sn*co - cn*so)/(co*co + so*so)`` of the old and
    the new row of ``cos_sin``, in float32, rounded once to the cache's type; what is too large for an 8-bit type
    becomes its largest number. The rest of them stays bit for bit.

    *What is written.* ``load`` writes the tokens of its segments from position ``skip_prefix_n_tokens`` on, and nothing
    else. Other requests may be reading the skipped prefix, holes, the rest of a block and other blocks: they are not
    touched, not even with equal values. ``save`` writes the rows of its segments and nothing else.

    *Order.* A transfer sees what the engine wrote to its pages before the call. What the engine does with its pages
    after ``wait`` returned sees the transfer. Until then neither side may be changed by others. Several may be under
    way at once. ``wait`` blocks the thread that calls it, because leases end after it; who must not block asks ``done``
    first.

    *Errors.* A segment that leaves its shard, the arena, the block table, the pages or the rotation's positions raises
    InvalidInput, and nothing is copied. So do segments of one load that overlap, a save to an arena that is read-only,
    and any copy before ``attach`` and ``pin`` or after ``close``.
    """

    torch_type: str = "cpu"
    """Where the engine's pages lie, as torch calls it."""

    formats: tuple[PageFormat, ...] = get_args(PageFormat)
    """The page formats that this device serves."""

    dtypes: tuple[str, ...] = tuple(ITEM_SIZES)
    """The types of numbers that it serves."""

    block_tokens: int
    """How many neighbours this device likes to have recomputed together."""

    on_the_side: bool = True
    """Whether transfers leave the engine's computing alone, as those of a DMA engine do. If they need the cores that
    the engine computes with, the engine waits for them: both are done sooner than when they share."""

    @abstractmethod
    def attach(self, layers: Sequence[PagedLayer], block_size: int, layout: KVLayout) -> None:
        """Get to know the engine's pages, in the model's order. Once, before any transfer.

        Raises LayoutMismatch for pages that are not what ``layout`` says, Unsupported for a format or type that this
        device cannot serve, and InvalidInput the second time.
        """

    @abstractmethod
    def pin(self, arena: npt.NDArray[np.uint8]) -> None:
        """Get to know the arena's bytes, and make them fast to copy from and to. Replaces an earlier arena.

        Raises InvalidInput for what is no flat array of bytes, and after ``close``.
        """

    @abstractmethod
    def load(
        self, segments: Sequence[Segment], block_ids: npt.NDArray[np.int64], skip_prefix_n_tokens: int = 0
    ) -> Transfer:
        """Arena to pages. Block ``block_ids[i]`` holds the prompt's tokens from ``i * block_size`` on."""

    @abstractmethod
    def save(self, segments: Sequence[Segment], block_ids: npt.NDArray[np.int64]) -> Transfer:
        """Pages to arena. Keys are stored as they are; ``source_start`` plays no part."""

    @abstractmethod
    def close(self) -> None:
        """Wait for what is under way, and let go of arena and pages. Closing twice is fine."""
