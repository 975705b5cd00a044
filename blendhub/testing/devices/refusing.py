"""Input that a device must refuse without copying a byte."""

from collections.abc import Callable, Sequence
from typing import Any, cast, get_args

import numpy as np
import pytest
from msgspec.structs import replace

from blendhub.contracts import Device, PagedLayer, PageFormat, Segment
from blendhub.errors import InvalidInput, LayoutMismatch, Unsupported
from blendhub.layout import ITEM_SIZES, KVLayout
from blendhub.testing.devices.base import DeviceTests, MakeHarness
from blendhub.testing.devices.device_harness import DeviceHarness, Rotary, Setup
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

UNKNOWN_POSITIONS: dict[str, tuple[int, int, int]] = {
    "a source before the first position": (10, 14, -1),
    "a source half beyond the last position": (10, 14, 97),
    "a source beyond the last position": (10, 14, 100),
    "a source far beyond the last position": (10, 14, 2**40),
    "a target half beyond the last position": (98, 102, 3),
}


INVALID_ARENAS: dict[str, Any] = {
    "numbers with a sign": np.zeros(64, np.int8),
    "rows of bytes": np.zeros((2, 64), np.uint8),
    "bytes with gaps": np.zeros(128, np.uint8)[::2],
}

WRONG_LAYOUTS: tuple[dict[str, int], ...] = (
    {"layers": 3},
    {"kv_heads": 4},
    {"key_dim": 10},
    {"value_dim": 10},
    {"key_dim": 10, "value_dim": 14},
    {"kv_heads": 2, "key_dim": 18, "value_dim": 18},
)
"""Fields of the layout that differ from those of the pages."""


@holds("A segment beyond its shard, the arena, the block table, the pages or the")
class RefusingTests(DeviceTests):
    @pytest.mark.parametrize("first", [True, False], ids=["before a good one", "after a good one"])
    @pytest.mark.parametrize("name", INVALID_SEGMENTS)
    def test_invalid_segments_change_nothing(self, harness: DeviceHarness, name: str, first: bool) -> None:
        good, bad = harness.segment(40, 60, shard=1), INVALID_SEGMENTS[name](harness)
        segments = [bad, good] if first else [good, bad]
        for skipped in (0, 12):
            with pytest.raises(InvalidInput):
                harness.device.load(segments, harness.block_ids, skipped)
            harness.check()
        with pytest.raises(InvalidInput):
            harness.device.save(segments, harness.block_ids)
        harness.check()
        harness.load([good])

    @pytest.mark.parametrize("block", [-1, 13, 2**40])
    def test_a_block_that_does_not_exist_changes_nothing(self, harness: DeviceHarness, block: int) -> None:
        harness.block_ids[3] = block
        segments = [harness.segment(0, 20), harness.segment(20, 25, shard=1), harness.segment(32, 50, shard=2)]
        with pytest.raises(InvalidInput):
            harness.device.load(segments, harness.block_ids)
        with pytest.raises(InvalidInput):
            harness.device.save(segments, harness.block_ids)
        harness.check()

    @pytest.mark.parametrize("name", UNKNOWN_POSITIONS)
    def test_positions_beyond_the_rotation_table_change_nothing(self, make_harness: MakeHarness, name: str) -> None:
        rotations = (Rotary(positions=200), None, Rotary(positions=100))
        harness = make_harness(self.setup(rotations=rotations, n_blocks=20))
        start, end, source = UNKNOWN_POSITIONS[name]
        segments = [harness.segment(40, 60, shard=1, source=70), harness.segment(start, end, source=source)]
        with pytest.raises(InvalidInput):
            harness.device.load(segments, harness.block_ids)
        harness.check()
        harness.load(segments[:1])

    @pytest.mark.parametrize("others", [[(19, 22)], [(0, 11)], [(12, 13)], [(10, 20)], [(5, 25)], [(30, 40), (39, 45)]])
    @holds("So do overlapping segments of one load, a save to a read-only arena, and any")
    def test_segments_that_overlap_change_nothing(self, harness: DeviceHarness, others: list[tuple[int, int]]) -> None:
        spans = [(10, 20), *others]
        segments = [harness.segment(start, end, shard=number) for number, (start, end) in enumerate(spans)]
        for order in (segments, segments[::-1]):
            with pytest.raises(InvalidInput):
                harness.device.load(order, harness.block_ids)
            harness.check()

    def parameters(self) -> dict[str, Sequence[Any]]:
        wrong = []
        for format in self.formats:
            layout = self.setup(format=format).layout()
            for changed in WRONG_LAYOUTS:
                if _shown(format, layout) != _shown(format, replace(layout, **changed)):
                    wrong.append((format, changed))
        usual = self.setup()
        unserved = [replace(usual, format=format) for format in get_args(PageFormat) if format not in self.formats]
        unserved += [replace(usual, dtype=dtype) for dtype in ITEM_SIZES if dtype not in self.dtypes]
        others = [dtype for dtype in self.dtypes if ITEM_SIZES[dtype] != ITEM_SIZES[usual.dtype]]
        return {
            **super().parameters(),
            "wrong_layout": wrong,
            "dtype_of_another_size": others[:1],
            "setup_that_is_not_served": unserved,
        }

    @holds("Raises LayoutMismatch for pages that contradict ``layout``, Unsupported for a")
    def test_pages_that_are_not_what_the_layout_says(
        self, make_harness: MakeHarness, device: Device, wrong_layout: tuple[PageFormat, dict[str, int]]
    ) -> None:
        format, changed = wrong_layout
        harness = make_harness(self.setup(format=format))
        layout = replace(harness.layout, **changed)
        self._refused(device, harness.layers, harness.setup.block_size, layout)

    @holds("Raises LayoutMismatch for pages that contradict ``layout``, Unsupported for a")
    def test_pages_of_another_type(self, harness: DeviceHarness, device: Device, dtype_of_another_size: str) -> None:
        layout = replace(harness.layout, dtype=dtype_of_another_size)
        self._refused(device, harness.layers, harness.setup.block_size, layout)

    @holds("Raises LayoutMismatch for pages that contradict ``layout``, Unsupported for a")
    def test_pages_of_another_block_size(self, harness: DeviceHarness, device: Device) -> None:
        self._refused(device, harness.layers, harness.setup.block_size * 2, harness.layout)

    @holds("Raises LayoutMismatch for pages that contradict ``layout``, Unsupported for a")
    def test_too_many_tensors(self, harness: DeviceHarness, device: Device) -> None:
        layers = [replace(layer, tensors=layer.tensors * 2) for layer in harness.layers]
        self._refused(device, layers, harness.setup.block_size, harness.layout)

    @holds("Raises LayoutMismatch for pages that contradict ``layout``, Unsupported for a")
    def test_one_layer_of_many_that_differs(self, make_harness: MakeHarness, device: Device) -> None:
        harness = make_harness(self.setup(rotations=(None,) * 4))
        other = make_harness(self.setup(rotations=(None,) * 4, kv_heads=2, key_dim=18, value_dim=18))
        layers = [*harness.layers[:3], other.layers[3]]
        self._refused(device, layers, harness.setup.block_size, harness.layout)

    def _refused(self, device: Device, layers: list[PagedLayer], block_size: int, layout: KVLayout) -> None:
        with pytest.raises(LayoutMismatch):
            device.attach(layers, block_size, layout)

    @holds("Called once, before any transfer.")
    def test_a_device_is_attached_once(self, harness: DeviceHarness) -> None:
        with pytest.raises(InvalidInput):
            harness.device.attach(harness.layers, harness.setup.block_size, harness.layout)
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

    def _copies_nothing(self, device: Device, harness: DeviceHarness) -> None:
        for copy in (device.load, device.save):
            with pytest.raises(InvalidInput):
                copy(harness.chunks(3, 60), harness.block_ids)
        harness.check()

    @pytest.mark.parametrize("name", INVALID_ARENAS)
    @holds("Raises InvalidInput for anything but a flat array of bytes, and after")
    def test_an_arena_is_a_flat_array_of_bytes(self, harness: DeviceHarness, name: str) -> None:
        with pytest.raises(InvalidInput):
            harness.device.pin(INVALID_ARENAS[name])
        harness.load(harness.chunks(3, 60))

    def test_an_arena_that_is_read_only_serves_loads_only(self, harness: DeviceHarness) -> None:
        harness.arena = harness.arena.copy()
        harness.arena.flags.writeable = False
        harness.device.pin(harness.arena)
        harness.load(harness.chunks(3, 60))
        with pytest.raises(InvalidInput):
            harness.device.save(harness.chunks(3, 60), harness.block_ids)
        harness.check()

    @holds("Raises LayoutMismatch for pages that contradict ``layout``, Unsupported for a")
    def test_an_unknown_format_is_refused(self, harness: DeviceHarness, device: Device) -> None:
        layers = [replace(layer, format=cast(PageFormat, "spiral")) for layer in harness.layers]
        with pytest.raises(Unsupported):
            device.attach(layers, harness.setup.block_size, harness.layout)

    @holds("Raises LayoutMismatch for pages that contradict ``layout``, Unsupported for a")
    def test_unsupported_formats_and_dtypes_are_refused(self, device: Device, setup_that_is_not_served: Setup) -> None:
        with pytest.raises(Unsupported):
            DeviceHarness(device, self.torch_type, setup_that_is_not_served)


def _shown(format: PageFormat, layout: KVLayout) -> tuple[int, ...]:
    """What pages of the format show of a layout."""
    is_packed = format in ("packed_heads", "packed_tokens", "packed_transposed")
    widths = (layout.key_dim + layout.value_dim,) if is_packed else (layout.key_dim, layout.value_dim)
    return layout.layers, layout.kv_heads, *widths
