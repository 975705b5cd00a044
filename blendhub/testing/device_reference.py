"""A slow reference device: copies one token and one head at a time. Needs torch, and pages in host memory."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from blendhub.contracts import ArenaProgress, Device, PagedLayer, PageFormat, Rotation, Segment, Transfer
from blendhub.core.errors import InvalidInput, LayoutMismatch, Unsupported
from blendhub.core.layout import ITEM_SIZES, KVLayout

if TYPE_CHECKING:
    import torch

Bits: TypeAlias = npt.NDArray[Any]
"""Items of a cache as unsigned integers of their size."""
Floats: TypeAlias = npt.NDArray[np.float64]

BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def torch_type(dtype: str) -> "torch.dtype":
    import torch

    names = {"float8_e4m3": "float8_e4m3fn"}
    found = getattr(torch, names.get(dtype, dtype))
    assert isinstance(found, torch.dtype)
    return found


def bits_of(tensor: "torch.Tensor") -> Bits:
    """A tensor's items as unsigned integers, sharing its memory."""
    import torch

    shown: Bits = tensor.detach().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.itemsize]).numpy()
    return shown.view(BITS[tensor.itemsize])


def decoded(bits: Bits, dtype: str) -> Floats:
    import torch

    numbers: Floats = torch.from_numpy(np.array(bits)).view(torch_type(dtype)).double().numpy()
    return numbers


def encoded(numbers: npt.ArrayLike, dtype: str) -> Bits:
    import torch

    rounded: Bits = bits_of(torch.from_numpy(np.array(numbers, np.float64)).to(torch_type(dtype)))
    return rounded


def saturated(numbers: Floats, dtype: str) -> Floats:
    import torch

    largest = torch.finfo(torch_type(dtype)).max
    return np.clip(numbers, -largest, largest)


def step_at(numbers: Floats, dtype: str) -> Floats:
    """The distance between neighbouring numbers of this type at these values."""
    import torch

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


class CompletedTransfer(Transfer):
    """A transfer that ended before the call returned."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class ReferenceDevice(Device):
    block_tokens = 16

    exact: list[list[Floats]]
    """The unrounded value of each rotated item of each layer's pages."""
    tolerance: list[list[Floats]]
    """The largest allowed distance of a device's item from ``exact``; 0: not rotated, so equal bit for bit."""

    def __init__(self) -> None:
        self._layers: Sequence[PagedLayer] | None = None
        self._others: list[ReferenceDevice] = []
        """A device for each further group."""
        self._arena: npt.NDArray[np.uint8] | None = None
        self._closed = False

    def attach(self, layers: Sequence[PagedLayer], block_size: int, layout: KVLayout) -> None:
        if self._closed:
            raise InvalidInput("the device is closed")
        if self._layers is not None:
            self._attach_group(layers, block_size, layout)
            return
        if len(layers) != layout.layers:
            raise LayoutMismatch(f"{len(layers)} layers, but the layout has {layout.layers}")
        for layer in layers:
            self._check(layer, block_size, layout)
        self._layers, self._block_size, self._layout = layers, block_size, layout
        self._bits = [[bits_of(tensor) for tensor in layer.tensors] for layer in layers]
        self.clear_tolerances()
        self._n_blocks = min(bits[0].shape[0] for bits in self._bits)

    def _attach_group(self, layers: Sequence[PagedLayer], block_size: int, layout: KVLayout) -> None:
        if layout.chunk_tokens > self._layout.chunk_tokens:
            raise LayoutMismatch("a group has longer chunks than the first one")
        other = ReferenceDevice()
        other.attach(layers, block_size, layout)
        if self._arena is not None:
            other.pin(self._arena)
        self._others.append(other)

    def clear_tolerances(self) -> None:
        """Forget earlier rotations: the pages of both devices were made equal."""
        self.exact = [[np.zeros(bits.shape) for bits in tensors] for tensors in self._bits]
        self.tolerance = [[np.zeros(bits.shape) for bits in tensors] for tensors in self._bits]

    def _check(self, layer: PagedLayer, block_size: int, layout: KVLayout) -> None:
        if layer.format not in get_args(PageFormat):
            raise Unsupported(f"pages of {layer.name!r} are {layer.format!r}; see PageFormat")
        n_blocks = layer.tensors[0].shape[0]
        given = [tuple(tensor.shape) for tensor in layer.tensors]
        wanted = page_shapes(layer.format, n_blocks, block_size, layout)
        if given != wanted:
            raise LayoutMismatch(f"pages of {layer.name!r} have the shapes {given}, not {wanted}")
        if layer.format == "latent" and (layout.kv_heads, layout.value_dim) != (1, 0):
            raise LayoutMismatch(f"pages of {layer.name!r} are {layer.format!r}, which {layout} cannot be")
        kinds = {tensor.dtype for tensor in layer.tensors}
        as_bytes = ITEM_SIZES[layout.dtype] == 1 and kinds == {torch_type("uint8")}
        if kinds != {torch_type(layout.dtype)} and not as_bytes:
            raise LayoutMismatch(f"pages of {layer.name!r} are not {layout.dtype}")
        if layer.rotation and layout.dtype == "int8":
            raise Unsupported(f"keys of {layer.name!r} are int8, which cannot be rotated")

    def pin(self, arena: npt.NDArray[np.uint8], progress: Callable[[], ArenaProgress] | None = None) -> None:
        if self._closed:
            raise InvalidInput("the device is closed")
        if arena.dtype != np.uint8 or arena.ndim != 1 or arena.strides != (1,):
            raise InvalidInput("an arena is a flat array of bytes")
        self._arena = arena
        for other in self._others:
            other.pin(arena)

    def load(
        self,
        segments: Sequence[Segment],
        block_ids: npt.NDArray[np.int64],
        skip_prefix_n_tokens: int = 0,
        group: int = 0,
    ) -> Transfer:
        if group:
            return self._other(group).load(segments, block_ids, skip_prefix_n_tokens)
        _, layers = self._ready()
        self._check_segments(segments, block_ids)
        self._check_load(segments, skip_prefix_n_tokens)
        for segment in segments:
            for position in range(max(segment.span.start, skip_prefix_n_tokens), segment.span.end):
                source = segment.source_start + position - segment.span.start
                for index in range(len(layers)):
                    self._load_token(index, segment, position, source, int(block_ids[position // self._block_size]))
        return CompletedTransfer()

    def _load_token(self, index: int, segment: Segment, position: int, source: int, block: int) -> None:
        layer = (self._layers or ())[index]
        keys, values = self._rows(index, segment, position)
        for head in range(self._layout.kv_heads):
            place = (block, position % self._block_size, head)
            key, value = self._place(index, self._bits[index], place)
            value[:] = values[head]
            key[:] = keys[head]
            tolerance, _ = self._place(index, self.tolerance[index], place)
            tolerance[:] = 0
            if layer.rotation is not None and source != position:
                before = decoded(keys[head], self._layout.dtype)
                after, float32_error = self._rotated(before, layer.rotation, source, position)
                if ITEM_SIZES[self._layout.dtype] == 1:
                    after = saturated(after, self._layout.dtype)
                moved = float32_error > 0
                key[moved] = encoded(after[moved], self._layout.dtype)
                exact, _ = self._place(index, self.exact[index], place)
                exact[moved] = after[moved]
                rounding = step_at(np.abs(after) + float32_error, self._layout.dtype) / 2
                tolerance[moved] = (float32_error + rounding)[moved]

    def _rotated(self, key: Floats, rotation: Rotation, old: int, new: int) -> tuple[Floats, Floats]:
        return rotated(key, rotation, old, new)

    def save(self, segments: Sequence[Segment], block_ids: npt.NDArray[np.int64], group: int = 0) -> Transfer:
        if group:
            return self._other(group).save(segments, block_ids)
        arena, layers = self._ready()
        self._check_segments(segments, block_ids)
        if not arena.flags.writeable:
            raise InvalidInput("nothing can be saved to an arena that is read-only")
        for segment in segments:
            for position in range(segment.span.start, segment.span.end):
                block = int(block_ids[position // self._block_size])
                for index in range(len(layers)):
                    keys, values = self._rows(index, segment, position)
                    for head in range(self._layout.kv_heads):
                        place = (block, position % self._block_size, head)
                        keys[head], values[head] = self._place(index, self._bits[index], place)
        return CompletedTransfer()

    def close(self) -> None:
        self._closed = True
        for other in self._others:
            other.close()
        self._layers = self._arena = None
        self._bits = self.exact = self.tolerance = []

    def _other(self, group: int) -> "ReferenceDevice":
        if not 0 < group <= len(self._others):
            raise InvalidInput(f"there is no group {group}")
        return self._others[group - 1]

    def _ready(self) -> tuple[npt.NDArray[np.uint8], Sequence[PagedLayer]]:
        if self._arena is None or self._layers is None:
            raise InvalidInput("a device copies after attach and pin, and before close")
        return self._arena, self._layers

    def _rows(self, index: int, segment: Segment, position: int) -> tuple[Bits, Bits]:
        """The token's keys and values in the arena, as [heads, width]."""
        layout, row = self._layout, segment.row + position - segment.span.start
        assert self._arena is not None
        parts = []
        for part, row_bytes in (
            (layout.keys_at(index), layout.key_row_bytes),
            (layout.values_at(index), layout.value_row_bytes),
        ):
            at = segment.shard + part + row * row_bytes
            bits = self._arena[at : at + row_bytes].view(BITS[ITEM_SIZES[layout.dtype]])
            parts.append(bits.reshape(layout.kv_heads, row_bytes // layout.kv_heads // bits.itemsize))
        return parts[0], parts[1]

    def _place(
        self, index: int, arrays: Sequence[npt.NDArray[Any]], place: tuple[int, int, int]
    ) -> tuple[Items, Items]:
        assert self._layers is not None
        return key_and_value(self._layers[index].format, arrays, place, self._block_size, self._layout.key_dim)

    def _check_segments(self, segments: Sequence[Segment], block_ids: npt.NDArray[np.int64]) -> None:
        layout, arena = self._layout, self._arena
        assert arena is not None
        for segment in segments:
            if segment.row < 0 or segment.row + len(segment.span) > layout.chunk_tokens:
                raise InvalidInput(f"{segment} leaves its shard")
            if segment.shard < 0 or segment.shard + layout.shard_bytes > len(arena):
                raise InvalidInput(f"{segment} leaves the arena")
            for position in range(segment.span.start, segment.span.end):
                if position // self._block_size >= len(block_ids):
                    raise InvalidInput(f"{segment} leaves the block table")
                if not 0 <= block_ids[position // self._block_size] < self._n_blocks:
                    raise InvalidInput(f"{segment} leaves the pages")

    def _check_load(self, segments: Sequence[Segment], skip_prefix_n_tokens: int) -> None:
        if skip_prefix_n_tokens < 0:
            raise InvalidInput(f"skip_prefix_n_tokens must be 0 or more, got {skip_prefix_n_tokens}")
        seen: set[int] = set()
        for segment in segments:
            positions = set(range(segment.span.start, segment.span.end))
            if seen & positions:
                raise InvalidInput(f"{segment} overlaps another segment")
            seen |= positions
            for layer in self._layers or ():
                if layer.rotation is None or segment.source_start == segment.span.start:
                    continue
                end = max(segment.source_start, segment.span.start) + len(segment.span)
                if segment.source_start < 0 or end > len(layer.rotation.cos_sin):
                    raise InvalidInput(f"{segment} leaves the rotation's positions")
