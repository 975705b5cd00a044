"""The slow reference that devices are held against: it copies one token and one head at a time."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from blendhub.contracts import PagedLayer, PageFormat, Rotation, Segment
from blendhub.core.layout import ITEM_SIZES, KVLayout
from blendhub.devices import torch_type

Bits: TypeAlias = npt.NDArray[Any]
"""Items of a cache as unsigned integers of their size."""
Floats: TypeAlias = npt.NDArray[np.float64]

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


class Scattered:
    """Items of an array that do not lie together."""

    def __init__(self, array: npt.NDArray[Any], at: npt.NDArray[np.int64]) -> None:
        self._array, self._at = array, at

    def __setitem__(self, index: Any, items: Any) -> None:
        self._array[self._at[index]] = items

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return self._array[self._at]


Items: TypeAlias = npt.NDArray[Any] | Scattered


def key_and_value(
    format: PageFormat, arrays: Sequence[npt.NDArray[Any]], place: tuple[int, int, int], block_size: int, key_dim: int
) -> tuple[Items, Items]:
    """Views of one key and one value at ``place``: block, slot in the block, head."""
    block, slot, head = place
    first, last = arrays[0], arrays[-1]
    match format:
        case "packed_heads":
            both = first[block, head, slot]
            return both[:key_dim], both[key_dim:]
        case "packed_transposed":
            keys, values = np.split(first[block, head], [block_size * key_dim])
            return keys.reshape(key_dim, block_size)[:, slot], values.reshape(block_size, len(values) // block_size)[
                slot
            ]
        case "packed_tiles":
            both = first[block, head]
            key, value = np.arange(key_dim), np.arange(len(both) // block_size - key_dim)
            in_keys = slot // 16 * 16 * key_dim + key // 2 * 32 + slot % 16 * 2 + key % 2
            in_values = value // 16 * 16 * block_size + slot // 2 * 32 + value % 16 * 2 + slot % 2
            return Scattered(both, in_keys), Scattered(both, block_size * key_dim + in_values)
        case "split":
            return first[block, slot, head], last[block, slot, head]
        case "latent":
            return first[block, slot], first[block, slot, :0]


def rotated(key: Floats, rotation: Rotation, old: int, new: int) -> tuple[Floats, Floats]:
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
        self, segments: Sequence[Segment], block_ids: npt.NDArray[np.int64], skip_prefix_n_tokens: int = 0
    ) -> None:
        for segment in segments:
            for position in range(max(segment.span.start, skip_prefix_n_tokens), segment.span.end):
                source = segment.source_start + position - segment.span.start
                for index in range(len(self.layers)):
                    self._load_token(index, segment, position, source, int(block_ids[position // self.block_size]))

    def save(self, segments: Sequence[Segment], block_ids: npt.NDArray[np.int64]) -> None:
        for segment in segments:
            for position in range(segment.span.start, segment.span.end):
                block = int(block_ids[position // self.block_size])
                for index in range(len(self.layers)):
                    keys, values = self._rows(index, segment, position)
                    for head in range(self.layout.kv_heads):
                        place = (block, position % self.block_size, head)
                        keys[head], values[head] = self._place(index, self.bits[index], place)

    def rotated(self, key: Floats, rotation: Rotation, old: int, new: int) -> tuple[Floats, Floats]:
        return rotated(key, rotation, old, new)

    def _load_token(self, index: int, segment: Segment, position: int, source: int, block: int) -> None:
        rotation, dtype = self.layers[index].rotation, self.layout.dtype
        keys, values = self._rows(index, segment, position)
        for head in range(self.layout.kv_heads):
            place = (block, position % self.block_size, head)
            key, value = self._place(index, self.bits[index], place)
            value[:] = values[head]
            key[:] = keys[head]
            tolerance, _ = self._place(index, self.tolerance[index], place)
            tolerance[:] = 0
            if rotation is not None and source != position:
                after, float32_error = self.rotated(decoded(keys[head], dtype), rotation, source, position)
                if ITEM_SIZES[dtype] == 1:
                    largest = torch.finfo(torch_type(dtype)).max
                    after = np.clip(after, -largest, largest)
                moved = float32_error > 0
                key[moved] = encoded(after[moved], dtype)
                exact, _ = self._place(index, self.exact[index], place)
                exact[moved] = after[moved]
                rounding = step_at(np.abs(after) + float32_error, dtype) / 2
                tolerance[moved] = (float32_error + rounding)[moved]

    def _rows(self, index: int, segment: Segment, position: int) -> tuple[Bits, Bits]:
        """The token's keys and values in the arena, as [heads, width]."""
        layout, row = self.layout, segment.row + position - segment.span.start
        parts = []
        for part, row_bytes in (
            (layout.keys_at(index), layout.key_row_bytes),
            (layout.values_at(index), layout.value_row_bytes),
        ):
            at = segment.shard + part + row * row_bytes
            bits = self.arena[at : at + row_bytes].view(BITS[ITEM_SIZES[layout.dtype]])
            parts.append(bits.reshape(layout.kv_heads, row_bytes // layout.kv_heads // bits.itemsize))
        return parts[0], parts[1]

    def _place(
        self, index: int, arrays: Sequence[npt.NDArray[Any]], place: tuple[int, int, int]
    ) -> tuple[Items, Items]:
        return key_and_value(self.layers[index].format, arrays, place, self.block_size, self.layout.key_dim)
