"""Input that a device must refuse without copying a byte."""

import contextlib
from collections.abc import Callable
from typing import Any, cast, get_args

import numpy as np
import pytest
from msgspec.structs import replace

from blendhub.contracts import Device, PagedLayer, PageFormat, Segment
from blendhub.core.errors import InvalidInput, LayoutMismatch, Unsupported
from blendhub.core.layout import ITEM_SIZES, KVLayout
from blendhub.testing.devices.base import DeviceTests, MakeHarness
from blendhub.testing.devices.device_harness import DeviceHarness, Rotary
from blendhub.testing.sentences import holds

INVALID_SEGMENTS: dict[str, Callable[[DeviceHarness], Segment]] = {
    "a row before its shard": lambda harness: harness.segment(10, 14, row=-1),
    "rows beyond its shard": lambda harness: harness.segment(10, 14, row=harness.layout.chunk_tokens - 3),
    "more rows than a shard has": lambda harness: harness.segment(10, 11 + harness.layout.chunk_tokens),
    "a shard before the arena": lambda harness: Segment(harness.segment(10, 14).span, -64, 0, 10),
    "a shard that the arena cuts": lambda harness: Segment(
        harness.segment(10, 14).span, len(harness.arena) - harness.layout.shard_bytes + 64, 0, 10
    ),
    "a shard beyond the arena": lambda harness: Segment(harness.segment(10, 14).span, 2**50, 0, 10),
    "tokens half beyond the block table": lambda harness: harness.segment(harness.n_tokens - 2, harness.n_tokens + 2),
    "tokens beyond the block table": lambda harness: harness.segment(harness.n_tokens, harness.n_tokens + 4),
    "tokens far beyond the block table": lambda harness: harness.segment(2**40, 2**40 + 4),
}

UNKNOWN_POSITIONS = [(10, 14, -1), (10, 14, 97), (10, 14, 100), (10, 14, 2**40), (98, 102, 3)]
"""Spans and their sources, of which a position lies before or beyond a table of 100."""

INVALID_ARENAS: list[Any] = [np.zeros(64, np.int8), np.zeros((2, 64), np.uint8), np.zeros(128, np.uint8)[::2]]
"""Numbers with a sign, rows of bytes, bytes with gaps."""

WRONG_LAYOUTS: tuple[dict[str, int], ...] = (
    {"layers": 5},
    {"kv_heads": 4},
    {"key_dim": 10},
    {"value_dim": 10},
    {"key_dim": 10, "value_dim": 14},
    {"kv_heads": 2, "key_dim": 18, "value_dim": 18},
)
"""Fields of the layout that differ from those of the pages."""


@holds("A segment beyond its shard, the arena, the block table, the pages or the")
class DeviceRefusingTests(DeviceTests):
    @pytest.mark.parametrize("name", INVALID_SEGMENTS)
    def test_invalid_segments_change_nothing(self, harness: DeviceHarness, name: str) -> None:
        good, bad = harness.segment(40, 60, shard=1), INVALID_SEGMENTS[name](harness)
        for segments in ([bad, good], [good, bad]):
            for skipped in (0, 12):
                with pytest.raises(InvalidInput):
                    harness.device.load(segments, harness.block_ids, skipped)
                harness.check()
            with pytest.raises(InvalidInput):
                harness.device.save(segments, harness.block_ids)
            harness.check()
        harness.load([good])

    def test_a_block_that_does_not_exist_changes_nothing(self, harness: DeviceHarness) -> None:
        segments = [harness.segment(0, 20), harness.segment(20, 25, shard=1), harness.segment(32, 50, shard=2)]
        for block in (-1, 13, 2**40):
            harness.block_ids[3] = block
            with pytest.raises(InvalidInput):
                harness.device.load(segments, harness.block_ids)
            with pytest.raises(InvalidInput):
                harness.device.save(segments, harness.block_ids)
            harness.check()

    def test_positions_beyond_the_rotation_table_change_nothing(self, make_harness: MakeHarness) -> None:
        rotations = (Rotary(positions=200), None, Rotary(positions=100))
        harness = make_harness(self.setup(rotations=rotations, n_blocks=20))
        for start, end, source in UNKNOWN_POSITIONS:
            segments = [harness.segment(40, 60, shard=1, source=70), harness.segment(start, end, source=source)]
            with pytest.raises(InvalidInput):
                harness.device.load(segments, harness.block_ids)
            harness.check()
            harness.load(segments[:1])

    @holds("So do overlapping segments of one load, a save to a read-only arena, and any")
    def test_segments_that_overlap_change_nothing(self, harness: DeviceHarness) -> None:
        for others in ([(19, 22)], [(0, 11)], [(12, 13)], [(10, 20)], [(5, 25)], [(30, 40), (39, 45)]):
            spans = [(10, 20), *others]
            segments = [harness.segment(start, end, shard=number) for number, (start, end) in enumerate(spans)]
            for order in (segments, segments[::-1]):
                with pytest.raises(InvalidInput):
                    harness.device.load(order, harness.block_ids)
                harness.check()

    @holds("Raises Unsupported for a format or dtype")
    def test_pages_that_are_not_what_the_layout_says(self, make_harness: MakeHarness, format: PageFormat) -> None:
        """Also with another block size, more tensors, items of another size, and in one layer of many."""
        harness = make_harness(self.setup(format=format, rotations=(None,) * 4))
        layers, block_size, layout = harness.layers, harness.setup.block_size, harness.layout
        refused: list[tuple[list[PagedLayer], int, KVLayout]] = [
            (layers, 2 * block_size, layout),
            ([replace(layer, tensors=layer.tensors * 2) for layer in layers], block_size, layout),
        ]
        for dtype in self.dtypes:
            if ITEM_SIZES[dtype] != ITEM_SIZES[layout.dtype]:
                refused.append((layers, block_size, replace(layout, dtype=dtype)))
        for changed in WRONG_LAYOUTS:
            other = replace(layout, **changed)
            if _shown(format, other) != _shown(format, layout):
                refused.append((layers, block_size, other))
        if format != "latent":
            other_pages = make_harness(self.setup(format=format, rotations=(None,) * 4, kv_heads=2)).layers
            refused.append(([*layers[:3], other_pages[3]], block_size, layout))
        for given in refused:
            with contextlib.closing(self.create()) as device, pytest.raises(LayoutMismatch):
                device.attach(*given)

    @holds("Raises InvalidInput for a group that is not attached, as")
    def test_a_group_that_is_not_attached_is_refused(self, harness: DeviceHarness) -> None:
        for copy in (harness.device.load, harness.device.save):
            for group in (1, -1):
                with pytest.raises(InvalidInput):
                    copy(harness.chunks(3, 60), harness.block_ids, group=group)
        harness.check()

    @holds("Raises LayoutMismatch for pages that contradict ``layout``, and for longer")
    def test_groups_have_no_longer_chunks_than_the_first_one(self, make_harness: MakeHarness) -> None:
        harness, other = make_harness(self.setup()), make_harness(self.setup(chunk_tokens=64))
        with pytest.raises(LayoutMismatch):
            harness.device.attach(other.layers, other.setup.block_size, other.layout)
        harness.load(harness.chunks(3, 60))

    def test_nothing_is_copied_before_attach_and_pin(self, harness: DeviceHarness, device: Device) -> None:
        self._copies_nothing(device, harness)
        device.attach(harness.layers, harness.setup.block_size, harness.layout)
        self._copies_nothing(device, harness)

    def test_nothing_is_copied_after_close(self, harness: DeviceHarness) -> None:
        harness.device.close()
        self._copies_nothing(harness.device, harness)
        with pytest.raises(InvalidInput):
            harness.device.pin(harness.arena)
        with pytest.raises(InvalidInput):
            harness.device.attach(harness.layers, harness.setup.block_size, harness.layout)

    def _copies_nothing(self, device: Device, harness: DeviceHarness) -> None:
        for copy in (device.load, device.save):
            with pytest.raises(InvalidInput):
                copy(harness.chunks(3, 60), harness.block_ids)
        harness.check()

    @holds("Raises InvalidInput for anything but a flat array of bytes, and after")
    def test_an_arena_is_a_flat_array_of_bytes(self, harness: DeviceHarness) -> None:
        for arena in INVALID_ARENAS:
            with pytest.raises(InvalidInput):
                harness.device.pin(arena)
        harness.load(harness.chunks(3, 60))

    def test_an_arena_that_is_read_only_serves_loads_only(self, harness: DeviceHarness) -> None:
        harness.arena = harness.arena.copy()
        harness.arena.flags.writeable = False
        harness.device.pin(harness.arena)
        harness.load(harness.chunks(3, 60))
        with pytest.raises(InvalidInput):
            harness.device.save(harness.chunks(3, 60), harness.block_ids)
        harness.check()

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


def _shown(format: PageFormat, layout: KVLayout) -> tuple[int, ...]:
    """The part of a layout that pages of the format show."""
    is_packed = format in ("packed_heads", "packed_transposed", "packed_tiles")
    widths = (layout.key_dim + layout.value_dim,) if is_packed else (layout.key_dim, layout.value_dim)
    return layout.layers, layout.kv_heads, *widths
