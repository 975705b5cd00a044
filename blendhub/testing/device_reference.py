"""The slow reference that devices are held against: it copies one token and one head at a time."""

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from blendhub.contracts import PagedLayer, PageFormat, PageSegment, Rotation, Segment
from blendhub.core.layout import ITEM_SIZES, KVLayout
from blendhub.devices import torch_type

Bits: TypeAlias = npt.NDArray[Any]
"""Items of a cache as unsigned integers of their size."""
Floats: TypeAlias = npt.NDArray[np.float64]

Places: TypeAlias = tuple[tuple[Any, ...], tuple[Any, ...]]

BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def bits_of(tensor: torch.Tensor) -> Bits:
    """A tensor's items as unsigned integers, sharing its memory."""
    shown: Bits = tensor.detach().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.itemsize]).numpy()
    return shown.view(BITS[tensor.itemsize])


def decoded(bits: Bits, dtype: str) -> Floats:
    numbers: Floats = torch.from_numpy(np.array(bits)).view(torch_type(dtype)).double().numpy()
    return numbers


def encoded(numbers: npt.ArrayLike, dtype: str) -> Bits:
    rounded: Bits = bits_of(torch.from_numpy(np.array(numbers, np.float64)).to(torch_type(dtype)))
    return rounded


def step_at(numbers: Floats, dtype: str) -> Floats:
    """The distance between neighbouring numbers of this type at these values."""
    facts = torch.finfo(torch_type(dtype))
    sizes = np.maximum(np.abs(numbers), facts.smallest_normal)
    steps: Floats = facts.eps * 2.0 ** np.floor(np.log2(sizes))
    return steps


def page_shapes(format: PageFormat, n_blocks: int, block_size: int, layout: KVLayout) -> list[tuple[int, ...]]:
    """The shapes of one layer's tensors."""
    heads, key_dim, value_dim = layout.kv_heads, layout.key_dim, layout.value_dim
    shapes: dict[PageFormat, list[tuple[int, ...]]] = {
        "packed_heads": [(n_blocks, heads, block_size, key_dim + value_dim)],
        "packed_transposed": [(n_blocks, heads, block_size * (key_dim + value_dim))],
        "packed_tiles": [(n_blocks, heads, block_size * (key_dim + value_dim))],
        "split": [(n_blocks, block_size, heads, key_dim), (n_blocks, block_size, heads, value_dim)],
        "latent": [(n_blocks, block_size, key_dim)],
    }
    return shapes[format]


def places(format: PageFormat, block: int, slot: int, head: int, block_size: int, layout: KVLayout) -> Places:
    """The indices of one key in a layer's first tensor, and of its value in the last one."""
    key, value = np.arange(layout.key_dim), np.arange(layout.value_dim)
    values_at = block_size * layout.key_dim
    match format:
        case "packed_heads":
            return (block, head, slot, key), (block, head, slot, layout.key_dim + value)
        case "packed_transposed":
            in_values = values_at + slot * layout.value_dim + value
            return (block, head, key * block_size + slot), (block, head, in_values)
        case "packed_tiles":
            in_keys = slot // 16 * 16 * layout.key_dim + key // 2 * 32 + slot % 16 * 2 + key % 2
            in_values = value // 16 * 16 * block_size + slot // 2 * 32 + value % 16 * 2 + slot % 2
            return (block, head, in_keys), (block, head, values_at + in_values)
        case "split":
            return (block, slot, head, key), (block, slot, head, value)
        case "latent":
            return (block, slot, key), (block, slot, value)


class ReferenceDevice:
    """One group of layers with pages in host memory. It checks no argument."""

    exact: list[list[Floats]]
    """The unrounded value of each rotated item of each layer's pages."""
    tolerance: list[list[Floats]]
    """The largest allowed distance of a device's item from ``exact``; 0: not rotated, so equal bit for bit."""

    def __init__(self, layers: Sequence[PagedLayer], block_size: int, layout: KVLayout) -> None:
        self.layers, self.block_size, self.layout = layers, block_size, layout
        self.bits = [[bits_of(tensor) for tensor in layer.tensors] for layer in layers]
        self.arena = np.empty(0, np.uint8)
        self.clear_tolerances()

    def clear_tolerances(self) -> None:
        """Forget earlier rotations: the pages of the device and of the reference were made equal."""
        self.exact = [[np.zeros(bits.shape) for bits in tensors] for tensors in self.bits]
        self.tolerance = [[np.zeros(bits.shape) for bits in tensors] for tensors in self.bits]

    def load(
        self,
        segments: Sequence[Segment | PageSegment],
        block_ids: npt.NDArray[np.int64],
        skip_prefix_n_tokens: int = 0,
    ) -> None:
        for segment in segments:
            for position in range(max(segment.span.start, skip_prefix_n_tokens), segment.span.end):
                source = segment.source_start + position - segment.span.start
                for index in range(len(self.layers)):
                    self._load_token(index, segment, position, source, block_ids)

    def save(self, segments: Sequence[Segment], block_ids: npt.NDArray[np.int64]) -> None:
        for segment in segments:
            for position in range(segment.span.start, segment.span.end):
                for index, bits in enumerate(self.bits):
                    rows = self._stored(index, segment, position)
                    for (key, value), at in zip(rows, self._places(index, position, block_ids), strict=True):
                        key[:], value[:] = bits[0][at[0]], bits[-1][at[1]]

    def rotated(self, key: Floats, rotation: Rotation, old: int, new: int) -> tuple[Floats, Floats]:
        """A key rotated from one position to another, in float64, and the largest error of doing so in float32."""
        row_old, row_new = (rotation.cos_sin[position].double().tolist() for position in (old, new))
        half = len(row_old) // 2
        result, float32_error = key.copy(), np.zeros(len(key))
        for pair in range(half):
            cos_old, sin_old = row_old[pair], row_old[half + pair]
            cos_new, sin_new = row_new[pair], row_new[half + pair]
            scale = cos_old**2 + sin_old**2
            cos = (cos_new * cos_old + sin_new * sin_old) / scale
            sin = (sin_new * cos_old - cos_new * sin_old) / scale
            one, other = (pair, half + pair) if rotation.neox else (2 * pair, 2 * pair + 1)
            one, other = one + rotation.offset, other + rotation.offset
            result[one] = key[one] * cos - key[other] * sin
            result[other] = key[other] * cos + key[one] * sin
            float32_error[[one, other]] = 8 * np.finfo(np.float32).eps * np.hypot(key[one], key[other])
        return result, float32_error

    def _load_token(
        self,
        index: int,
        segment: Segment | PageSegment,
        position: int,
        source: int,
        block_ids: npt.NDArray[np.int64],
    ) -> None:
        rotation, dtype, bits = self.layers[index].rotation, self.layout.dtype, self.bits[index]
        if isinstance(segment, PageSegment):
            row = segment.row + position - segment.span.start
            rows = [(bits[0][at[0]], bits[-1][at[1]]) for at in self._places(index, row, segment.blocks)]
        else:
            rows = list(self._stored(index, segment, position))
        for (stored, value), (key_at, value_at) in zip(rows, self._places(index, position, block_ids), strict=True):
            key, tolerance = stored.copy(), np.zeros(len(stored))
            if rotation is not None and source != position:
                exact, float32_error = self.rotated(decoded(stored, dtype), rotation, source, position)
                if ITEM_SIZES[dtype] == 1:
                    largest = torch.finfo(torch_type(dtype)).max
                    exact = np.clip(exact, -largest, largest)
                moved = float32_error > 0
                key[moved] = encoded(exact[moved], dtype)
                rounding = step_at(np.abs(exact) + float32_error, dtype) / 2
                tolerance[moved] = (float32_error + rounding)[moved]
                self.exact[index][0][key_at] = exact
            self.tolerance[index][0][key_at] = tolerance
            bits[0][key_at], bits[-1][value_at] = key, value

    def _stored(self, index: int, segment: Segment, position: int) -> Iterator[tuple[Bits, Bits]]:
        """Views of a token's key and value in the arena, for each head."""
        layout, row, rows = self.layout, segment.row + position - segment.span.start, []
        for part, row_bytes in (
            (layout.keys_at(index), layout.key_row_bytes),
            (layout.values_at(index), layout.value_row_bytes),
        ):
            at = segment.shard + part + row * row_bytes
            bits = self.arena[at : at + row_bytes].view(BITS[ITEM_SIZES[layout.dtype]])
            rows.append(bits.reshape(layout.kv_heads, row_bytes // layout.kv_heads // bits.itemsize))
        return zip(*rows, strict=True)

    def _places(self, index: int, at: int, blocks: npt.NDArray[np.int64]) -> Iterator[Places]:
        """The places in the pages of the token ``at`` of these blocks: its key's and its value's, for each head."""
        number, slot = divmod(at, self.block_size)
        for head in range(self.layout.kv_heads):
            place = int(blocks[number]), slot, head
            yield places(self.layers[index].format, *place, self.block_size, self.layout)
