"""Input that a device must refuse without copying a byte. ``Device`` does, unless a subclass overrides that."""

import contextlib
from typing import Any, cast, get_args

import numpy as np
import pytest
from msgspec.structs import replace

from blendhub.contracts import Device, PageFormat, PageSegment, Segment
from blendhub.core.errors import InvalidInput, LayoutMismatch, Unsupported
from blendhub.core.layout import ITEM_SIZES
from blendhub.core.spans import Span
from blendhub.testing.devices.base import DeviceTests, MakeHarness
from blendhub.testing.devices.device_harness import DeviceHarness, Rotary
from blendhub.testing.sentences import holds

BLOCKS, SHARDS, POSITIONS = 18, 5, 100
INVALID_SEGMENTS: dict[str, dict[str, int]] = {
    "a row before its shard": {"start": 10, "end": 14, "row": -1},
    "rows beyond its shard": {"start": 10, "end": 14, "row": 21},
    "more rows than a shard has": {"start": 10, "end": 35},
    "a shard before the arena": {"start": 10, "end": 14, "shard": -1},
    "a shard that the arena cuts": {"start": 10, "end": 14, "shard": SHARDS},
    "a shard beyond the arena": {"start": 10, "end": 14, "shard": 2**30},
    "tokens half beyond the block table": {"start": 8 * BLOCKS - 2, "end": 8 * BLOCKS + 2},
    "tokens far beyond the block table": {"start": 2**40, "end": 2**40 + 4},
    "a block before the pages": {"start": 24, "end": 30},
    "a block beyond the pages": {"start": 33, "end": 37},
}
"""Segments that a device with blocks of 8 tokens and chunks of 24 rows refuses beside good ones."""
INVALID_LOADS: dict[str, dict[str, int]] = {
    "a position before the table": {"start": 10, "end": 14, "source": -1},
    "a last position beyond the table": {"start": 10, "end": 14, "source": POSITIONS - 3},
    "a new position beyond the table": {"start": 98, "end": 102, "source": 3},
    "the last token of another segment": {"start": 59, "end": 70},
    "tokens around another segment": {"start": 45, "end": 65},
    "a token within another segment": {"start": 50, "end": 51},
}
INVALID_SOURCES: dict[str, dict[str, Any]] = {
    "a row before its blocks": {"row": -1},
    "rows beyond its blocks": {"row": 5},
    "no blocks": {"blocks": np.empty(0, np.int64)},
    "numbers that are no integers": {"blocks": np.ones(1)},
    "a source before the pages": {"blocks": np.array([-1])},
    "a source beyond the pages": {"blocks": np.array([BLOCKS + 2])},
    "a position beyond the table": {"source_start": POSITIONS - 3},
}
"""Changes of four tokens in one block of 8 tokens."""
INVALID_ARENAS: list[Any] = [np.zeros(64, np.int8), np.zeros((2, 64), np.uint8), np.zeros(128, np.uint8)[::2]]
"""Numbers with a sign, rows of bytes, bytes with gaps."""


@holds("A segment beyond its shard, the arena, the block table, the pages or the")
class DeviceRefusingTests(DeviceTests):
    def test_invalid_segments_change_nothing(self, make_harness: MakeHarness) -> None:
        rotations = (Rotary(positions=2 * POSITIONS), None, Rotary(positions=POSITIONS))
        harness = make_harness(self.setup(n_blocks=BLOCKS + 2, n_shards=SHARDS, rotations=rotations))
        good = [harness.segment(40, 60, shard=1, source=70), harness.segment(70, 80, shard=2, source=70)]
        block_ids = harness.block_ids.copy()
        block_ids[3:5] = -1, 2**40
        for name, fields in {**INVALID_SEGMENTS, **INVALID_LOADS}.items():
            bad = harness.segment(**fields)
            for segments in ([bad, *good], [*good, bad]):
                with pytest.raises(InvalidInput):
                    harness.device.load(segments, block_ids, 12)
                harness.check()
                if name in INVALID_SEGMENTS:
                    with pytest.raises(InvalidInput):
                        harness.device.save(segments, block_ids)
                    harness.check()
        harness.load(good)

    @holds("So do overlapping segments of one load, a block that it reads and writes, a")
    def test_invalid_sources_change_nothing(self, make_harness: MakeHarness) -> None:
        """A block may be read that is written only where the load skips it."""
        sizes = {"n_blocks": BLOCKS + 2, "n_shards": SHARDS}
        harness = make_harness(self.setup(**sizes, rotations=(Rotary(positions=POSITIONS),)))
        good = harness.copied(40, 44, row=4)
        own = replace(good, span=Span(60, 64), blocks=harness.block_ids[5:6])
        refused: list[list[Segment | PageSegment]] = [[good, own], [own, harness.segment(46, 50)]]
        refused += [[replace(good, **fields)] for fields in INVALID_SOURCES.values()]
        for segments in refused:
            with pytest.raises(InvalidInput):
                harness.device.load([harness.segment(70, 80), *segments], harness.block_ids)
            harness.check()
        harness.load([good, own, harness.segment(44, 48)], 48)

    @holds("So do overlapping segments of one load, a block that it reads and writes, a")
    def test_nothing_is_copied_without_group_pages_or_arena(self, harness: DeviceHarness, device: Device) -> None:
        def refuses(device: Device, **group: int) -> None:
            for copy in (device.load, device.save):
                with pytest.raises(InvalidInput):
                    copy(harness.chunks(3, 60), harness.block_ids, **group)
            harness.check()

        refuses(device)
        device.attach(harness.layers, harness.setup.block_size, harness.layout)
        refuses(device)
        refuses(harness.device, group=1)
        refuses(harness.device, group=-1)
        harness.device.close()
        refuses(harness.device)
        with pytest.raises(InvalidInput):
            harness.device.pin(harness.arena)
        with pytest.raises(InvalidInput):
            harness.device.attach(harness.layers, harness.setup.block_size, harness.layout)

    @holds("Raises InvalidInput for anything but a flat array of bytes, and after")
    def test_an_arena_is_a_flat_array_of_bytes(self, harness: DeviceHarness) -> None:
        """One that is read-only serves loads only."""
        for arena in INVALID_ARENAS:
            with pytest.raises(InvalidInput):
                harness.device.pin(arena)
        harness.load(harness.chunks(3, 60))
        harness.arena = harness.arena.copy()
        harness.arena.flags.writeable = False
        harness.device.pin(harness.arena)
        harness.load(harness.chunks(3, 60))
        with pytest.raises(InvalidInput):
            harness.device.save(harness.chunks(3, 60), harness.block_ids)
        harness.check()

    @holds("Raises LayoutMismatch for pages that contradict ``layout``, and for longer")
    def test_pages_that_are_not_what_the_layout_says(self, make_harness: MakeHarness, format: PageFormat) -> None:
        harness = make_harness(self.setup(format=format, rotations=(None,) * 4))
        layers, layout, block_size = harness.layers, harness.layout, harness.setup.block_size
        refused = [
            ([replace(layer, tensors=layer.tensors * 2) for layer in layers], block_size, layout),
            (layers, 2 * block_size, layout),
        ]
        refused += [
            (layers, block_size, replace(layout, dtype=dtype)) for dtype in self.dtypes if dtype != layout.dtype
        ]
        for field in ("layers", "kv_heads", "key_dim"):
            refused.append((layers, block_size, replace(layout, **{field: getattr(layout, field) + 2})))
        for arguments in refused:
            with contextlib.closing(self.create()) as device, pytest.raises(LayoutMismatch):
                device.attach(*arguments)
        with pytest.raises(LayoutMismatch):  # longer chunks than those of the first group
            harness.device.attach(layers, block_size, replace(layout, chunk_tokens=64))
        harness.load(harness.chunks(3, 60))

    @holds("Raises Unsupported for a format or dtype")
    def test_unsupported_formats_and_dtypes_are_refused(self, harness: DeviceHarness, device: Device) -> None:
        layers = [replace(layer, format=cast(PageFormat, "spiral")) for layer in harness.layers]
        with pytest.raises(Unsupported):
            device.attach(layers, harness.setup.block_size, harness.layout)
        usual = self.setup()
        unserved = [replace(usual, format=format) for format in get_args(PageFormat) if format not in self.formats]
        unserved += [replace(usual, dtype=dtype) for dtype in ITEM_SIZES if dtype not in self.dtypes]
        for setup in unserved:
            with contextlib.closing(self.create()) as device, pytest.raises(Unsupported):
                DeviceHarness(device, self.torch_type, setup)
