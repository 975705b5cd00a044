"""Runs a device and the reference on equal pages and arenas, and compares every byte afterwards."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from blendhub.contracts import Device, PagedLayer, PageFormat, PageSegment, Rotation, Segment, Transfer
from blendhub.core.layout import ITEM_SIZES, KVLayout
from blendhub.core.spans import Span
from blendhub.devices import torch_type
from blendhub.testing.device_reference import ReferenceDevice, bits_of, decoded, encoded, page_shapes


class Rotary(msgspec.Struct, frozen=True):
    """Parameters of a rotary embedding, from which ``build`` makes a layer's ``Rotation``."""

    width: int = 8
    neox: bool = True
    offset: int = 0
    scale: float = 1.0
    positions: int = 1024
    base: float = 10_000.0

    def build(self) -> Rotation:
        return Rotation(_table(self.width, self.scale, self.positions, self.base), self.neox, self.offset)


@lru_cache(maxsize=32)
def _table(width: int, scale: float, positions: int, base: float) -> torch.Tensor:
    """Equal parameters share one tensor, as the layers of a model do."""
    half = width // 2
    angles = np.outer(np.arange(positions), base ** (-np.arange(half) / half))
    table = scale * np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
    return torch.from_numpy(table.astype(np.float32))


class DeviceSetup(msgspec.Struct, frozen=True, kw_only=True):
    """Layout and sizes of the pages and the arena of a test; for tiles, sizes are rounded up to whole ones."""

    format: PageFormat = "packed_heads"
    dtype: str = "float32"
    block_size: int = 8
    chunk_tokens: int = 24
    kv_heads: int = 3
    key_dim: int = 12
    value_dim: int = 12
    rotations: tuple[Rotary | None, ...] = (None, None)
    """One for each layer; None: its keys are not rotated."""
    strided: bool = False
    """Whether pages are a view of a larger allocation."""
    n_blocks: int = 13
    n_shards: int = 5

    def __post_init__(self) -> None:
        if self.format == "packed_tiles":
            for name in ("block_size", "key_dim", "value_dim"):
                msgspec.structs.force_setattr(self, name, -(-getattr(self, name) // 16) * 16)

    def layout(self) -> KVLayout:
        latent = self.format == "latent"
        return KVLayout(
            layers=len(self.rotations),
            kv_heads=1 if latent else self.kv_heads,
            key_dim=self.key_dim,
            value_dim=0 if latent else self.value_dim,
            dtype=self.dtype,
            chunk_tokens=self.chunk_tokens,
        )


class DeviceHarness:
    """Makes the device and the reference do the same transfers, then compares every byte of pages and arena.

    All bytes are random before anything is copied, also those between and around the pages of strided tensors.
    """

    def __init__(self, device: Device, torch_type: str, setup: DeviceSetup, seed: int = 1) -> None:
        self.device = device
        self.setup = setup
        self.layout = setup.layout()
        self._group: dict[str, int] = {}
        """The argument of transfers that names the group of this harness's layers; empty for the first group."""
        self._random = np.random.default_rng(seed)
        self._layers = [self._layer(index, rotation) for index, rotation in enumerate(setup.rotations)]
        self.reference = ReferenceDevice(self._layers, setup.block_size, self.layout)
        self.expected_arena = self._random_arena()
        self.arena = self.expected_arena.copy()
        blocks = self._random.permutation(setup.n_blocks).astype(np.int64)
        self.block_ids, self.donors = blocks[:-2], blocks[-2:]
        """The block table, and blocks that no load writes."""
        self.layers = _moved(self._layers, torch_type)
        self.replace_device(device, self.layers)

    @property
    def expected_arena(self) -> npt.NDArray[np.uint8]:
        return self.reference.arena

    @expected_arena.setter
    def expected_arena(self, arena: npt.NDArray[np.uint8]) -> None:
        self.reference.arena = arena

    @property
    def n_tokens(self) -> int:
        """How many tokens the block table holds."""
        return len(self.block_ids) * self.setup.block_size

    def segment(self, start: int, end: int, *, shard: int = 0, row: int = 0, source: int | None = None) -> Segment:
        """Tokens ``[start, end)``, stored from row ``row`` of shard number ``shard`` on."""
        return Segment(Span(start, end), self.shard(shard), row, start if source is None else source)

    def copied(self, start: int, end: int, *, row: int = 0, source: int | None = None) -> PageSegment:
        """Tokens ``[start, end)``, kept from row ``row`` of the donors' blocks on, which are taken in turn."""
        n_blocks = -(-(row + end - start) // self.setup.block_size)
        return PageSegment(Span(start, end), np.resize(self.donors, n_blocks), row, start if source is None else source)

    def shard(self, number: int) -> int:
        # Neither the first shard nor the distance of two is a multiple of a cache line.
        return ITEM_SIZES[self.layout.dtype] * (3 + number) + number * self.layout.shard_bytes

    def chunks(self, start: int, end: int, *, source: int | None = None) -> list[Segment]:
        """A run's chunks, one shard each, the first of which begins at ``start``."""
        size = self.layout.chunk_tokens
        return [
            self.segment(at, min(at + size, end), shard=number, source=None if source is None else source + at - start)
            for number, at in enumerate(range(start, end, size))
        ]

    def replace_device(self, device: Device, layers: Sequence[PagedLayer]) -> None:
        """Close the device, and test another one that is attached to these layers."""
        if device is not self.device:
            self.device.close()
        self.device = device
        device.attach(layers, self.setup.block_size, self.layout)
        device.pin(self.arena)

    def join(self, other: "DeviceHarness", group: int) -> None:
        """Attach these layers as a further group of another harness's device, and use its arena."""
        self.device.close()
        self.device, self._group = other.device, {"group": group}
        self.device.attach(self.layers, self.setup.block_size, self.layout)
        self.arena, self.expected_arena = other.arena, other.expected_arena

    def load(self, segments: Sequence[Segment | PageSegment], skip_prefix_n_tokens: int = 0) -> None:
        self.start_load(segments, skip_prefix_n_tokens).wait()
        self.check()

    def save(self, segments: Sequence[Segment]) -> None:
        self.start_save(segments).wait()
        self.check()

    def start_load(self, segments: Sequence[Segment | PageSegment], skip_prefix_n_tokens: int = 0) -> Transfer:
        self.reference.load(segments, self.block_ids, skip_prefix_n_tokens)
        return self.device.load(segments, self.block_ids, skip_prefix_n_tokens, **self._group)

    def start_save(self, segments: Sequence[Segment]) -> Transfer:
        self.reference.save(segments, self.block_ids)
        return self.device.save(segments, self.block_ids, **self._group)

    def pin_new_arena(self) -> None:
        """Replace the arena by one with new random bytes."""
        self.expected_arena = self._random_arena()
        self.arena = self.expected_arena.copy()
        self.device.pin(self.arena)

    def overwrite_pages(self, blocks: slice = slice(None), after: Callable[[], None] = lambda: None) -> None:
        """Write new random bytes to the pages of these blocks, as an engine writes KV.

        ``after`` may submit work to the engine's stream: the writes follow it, and nothing waits for them.
        """
        writes: list[tuple[torch.Tensor, torch.Tensor]] = []
        for layer, expected in zip(self.layers, self._layers, strict=True):
            for tensor, twin in zip(layer.tensors, expected.tensors, strict=True):
                written = twin[blocks]
                bits_of(written)[...] = self._random_items(written.shape)
                writes.append((tensor[blocks], written.to(tensor.device)))
        after()
        for pages, values in writes:
            pages.copy_(values)

    def check(self) -> None:
        """Raise AssertionError unless pages and arena equal the reference's."""
        wrong = np.flatnonzero(self.arena != self.expected_arena)
        assert not len(wrong), f"{len(wrong)} bytes of the arena differ, the first at {wrong[0]}"
        for index, (layer, expected) in enumerate(zip(self.layers, self._layers, strict=True)):
            for number, (tensor, twin) in enumerate(zip(layer.tensors, expected.tensors, strict=True)):
                self._check_pages(f"layer {index}, tensor {number}", _on_cpu(tensor), twin, index, number)
        self.reference.clear_tolerances()

    def _check_pages(self, name: str, found: torch.Tensor, expected: torch.Tensor, layer: int, number: int) -> None:
        got, wanted = bits_of(found), bits_of(expected)
        tolerance = self.reference.tolerance[layer][number]
        wrong = np.argwhere((got != wanted) & (tolerance == 0))
        assert not len(wrong), f"{name}: {len(wrong)} items should be equal bit for bit, the first at {wrong[0]}"
        rotated = tolerance > 0
        if rotated.any():
            exact = self.reference.exact[layer][number][rotated]
            error = np.abs(decoded(got[rotated], self.layout.dtype) - exact)
            worst = np.max(np.where(np.isnan(error), np.inf, error / tolerance[rotated]))
            assert worst <= 1, f"{name}: the error of a rotated key is {worst:.3g} times what rounding allows"
            wanted[rotated] = got[rotated]
        outside = _bytes_of(found) != _bytes_of(expected)
        assert not outside.any(), f"{name}: {np.count_nonzero(outside)} bytes outside the pages were written"

    def _layer(self, index: int, rotation: Rotary | None) -> PagedLayer:
        setup = self.setup
        shapes = page_shapes(setup.format, setup.n_blocks, setup.block_size, self.layout)
        tensors = tuple(self._tensor(shape) for shape in shapes)
        return PagedLayer(f"layer {index}", setup.format, tensors, rotation.build() if rotation else None)

    def _tensor(self, shape: tuple[int, ...]) -> torch.Tensor:
        room = tuple(size + 3 for size in shape) if self.setup.strided else shape
        whole = torch.from_numpy(self._random_items(room).view(np.uint8)).view(torch_type(self.setup.dtype))
        return whole[tuple(slice(2, 2 + size) for size in shape)] if self.setup.strided else whole

    def _random_bits(self, shape: Sequence[int]) -> npt.NDArray[Any]:
        size = ITEM_SIZES[self.setup.dtype]
        return self._random.integers(0, 2 ** (8 * size), tuple(shape), {1: np.uint8, 2: np.uint16, 4: np.uint32}[size])

    def _random_arena(self) -> npt.NDArray[np.uint8]:
        n_items = (self.shard(self.setup.n_shards) + 64) // ITEM_SIZES[self.setup.dtype]
        return self._random_items((n_items,)).view(np.uint8)

    def _random_items(self, shape: Sequence[int]) -> npt.NDArray[Any]:
        if any(self.setup.rotations):
            # Keys that are rotated must be numbers; what is only copied may be any bits.
            return encoded(self._random.normal(0, 2, tuple(shape)), self.setup.dtype)
        return self._random_bits(shape)


def occupy_engine(torch_type: str) -> None:
    """Submit work to the engine's stream that takes an accelerator about a tenth of a second; a host has no stream."""
    if torch_type == "cpu":
        return
    numbers = torch.ones(4096, 4096, dtype=torch.bfloat16, device=torch_type)
    for _ in range(300):
        numbers = numbers @ numbers * 0.0


def _moved(layers: Sequence[PagedLayer], torch_type: str) -> list[PagedLayer]:
    """Copies of the layers on ``torch_type``, with the same strides, allocation sizes and sharing of tables."""
    tables: dict[int, torch.Tensor] = {}

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        whole = torch.from_numpy(_bytes_of(tensor).copy()).to(torch_type).view(tensor.dtype)
        return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def moved_rotation(rotation: Rotation | None) -> Rotation | None:
        if rotation is None:
            return None
        table = tables.setdefault(id(rotation.cos_sin), rotation.cos_sin.to(torch_type))
        return Rotation(table, rotation.neox, rotation.offset)

    return [
        PagedLayer(layer.name, layer.format, tuple(map(moved, layer.tensors)), moved_rotation(layer.rotation))
        for layer in layers
    ]


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
    return whole.cpu().as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _bytes_of(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """All bytes of a tensor's allocation."""
    shown: npt.NDArray[np.uint8] = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()
    return shown
