"""What a device must refuse, without copying a byte."""

from collections.abc import Callable
from typing import Any, cast, get_args

import msgspec
import numpy as np
import pytest

from blendhub.contracts import Device, PagedLayer, PageFormat, Segment
from blendhub.errors import InvalidInput, LayoutMismatch, Unsupported
from blendhub.layout import ITEM_SIZES, KVLayout
from blendhub.testing.devices.base import DeviceTests, MakeWorld
from blendhub.testing.devices.world import Setup, Turning, World

INVALID: dict[str, Callable[[World], Segment]] = {
    "a row before its shard": lambda world: world.segment(10, 14, row=-1),
    "rows beyond its shard": lambda world: world.segment(10, 14, row=world.layout.chunk_tokens - 3),
    "more rows than a shard has": lambda world: world.segment(10, 11 + world.layout.chunk_tokens),
    "a shard before the arena": lambda world: Segment(world.segment(10, 14).span, -64, 0, 10),
    "a shard that the arena cuts": lambda world: Segment(
        world.segment(10, 14).span, len(world.arena) - world.layout.shard_bytes + 64, 0, 10
    ),
    "a shard beyond the arena": lambda world: Segment(world.segment(10, 14).span, 2**50, 0, 10),
    "tokens half beyond the block table": lambda world: world.segment(world.n_tokens - 2, world.n_tokens + 2),
    "tokens beyond the block table": lambda world: world.segment(world.n_tokens, world.n_tokens + 4),
    "tokens far beyond the block table": lambda world: world.segment(2**40, 2**40 + 4),
}

UNTURNABLE: dict[str, tuple[int, int, int]] = {
    "a source before the first position": (10, 14, -1),
    "a source half beyond the last position": (10, 14, 97),
    "a source beyond the last position": (10, 14, 100),
    "a source far beyond the last position": (10, 14, 2**40),
    "a target half beyond the last position": (98, 102, 3),
}


NO_ARENAS: dict[str, Any] = {
    "numbers with a sign": np.zeros(64, np.int8),
    "rows of bytes": np.zeros((2, 64), np.uint8),
    "bytes with gaps": np.zeros(128, np.uint8)[::2],
}


class RefusingTests(DeviceTests):
    @pytest.mark.parametrize("first", [True, False], ids=["before a good one", "after a good one"])
    @pytest.mark.parametrize("name", INVALID)
    def test_invalid_segments_change_nothing(self, world: World, name: str, first: bool) -> None:
        good, bad = world.segment(40, 60, shard=1), INVALID[name](world)
        segments = [bad, good] if first else [good, bad]
        for skipped in (0, 12):
            with pytest.raises(InvalidInput):
                world.device.load(segments, world.block_ids, skipped)
            world.check()
        with pytest.raises(InvalidInput):
            world.device.save(segments, world.block_ids)
        world.check()
        world.load([good])

    @pytest.mark.parametrize("block", [-1, 13, 2**40])
    def test_a_block_that_does_not_exist_changes_nothing(self, world: World, block: int) -> None:
        world.block_ids[3] = block
        segments = [world.segment(0, 20), world.segment(20, 25, shard=1), world.segment(32, 50, shard=2)]
        with pytest.raises(InvalidInput):
            world.device.load(segments, world.block_ids)
        with pytest.raises(InvalidInput):
            world.device.save(segments, world.block_ids)
        world.check()

    @pytest.mark.parametrize("name", UNTURNABLE)
    def test_positions_that_the_rotation_does_not_know_change_nothing(self, make_world: MakeWorld, name: str) -> None:
        turnings = (Turning(positions=200), None, Turning(positions=100))
        world = make_world(self.setup(turnings=turnings, n_blocks=20))
        start, end, source = UNTURNABLE[name]
        segments = [world.segment(40, 60, shard=1, source=70), world.segment(start, end, source=source)]
        with pytest.raises(InvalidInput):
            world.device.load(segments, world.block_ids)
        world.check()
        world.load(segments[:1])

    @pytest.mark.parametrize("others", [[(19, 22)], [(0, 11)], [(12, 13)], [(10, 20)], [(5, 25)], [(30, 40), (39, 45)]])
    def test_segments_that_overlap_change_nothing(self, world: World, others: list[tuple[int, int]]) -> None:
        spans = [(10, 20), *others]
        segments = [world.segment(start, end, shard=number) for number, (start, end) in enumerate(spans)]
        for order in (segments, segments[::-1]):
            with pytest.raises(InvalidInput):
                world.device.load(order, world.block_ids)
            world.check()

    @pytest.mark.parametrize(
        "changed",
        [
            {"layers": 3},
            {"kv_heads": 4},
            {"key_dim": 10},
            {"value_dim": 10},
            {"key_dim": 10, "value_dim": 14},
            {"kv_heads": 2, "key_dim": 18, "value_dim": 18},
        ],
        ids=str,
    )
    @pytest.mark.parametrize("format", get_args(PageFormat))
    def test_pages_that_are_not_what_the_layout_says(
        self, make_world: MakeWorld, device: Device, format: PageFormat, changed: dict[str, Any]
    ) -> None:
        world = make_world(self.setup(format=format))
        if {**msgspec.structs.asdict(world.layout), **changed} == msgspec.structs.asdict(world.layout):
            pytest.skip("this is what the layout says")
        layout = msgspec.structs.replace(world.layout, **changed)
        if format in ("packed_heads", "packed_tokens", "packed_transposed") and "layers" not in changed:
            same = layout.kv_heads == world.layout.kv_heads and layout.key_dim + layout.value_dim == 24
            if same:
                pytest.skip("only the sum of both widths shows in a packed page")
        self._refused(device, world.layers, world.setup.block_size, layout)

    def test_pages_of_another_type(self, world: World, device: Device) -> None:
        others = [dtype for dtype in self.dtypes if ITEM_SIZES[dtype] != ITEM_SIZES[world.layout.dtype]]
        if not others:
            pytest.skip("this device serves one size of numbers only")
        layout = msgspec.structs.replace(world.layout, dtype=others[0])
        self._refused(device, world.layers, world.setup.block_size, layout)

    def test_pages_of_another_block_size(self, world: World, device: Device) -> None:
        self._refused(device, world.layers, world.setup.block_size * 2, world.layout)

    def test_too_many_tensors(self, world: World, device: Device) -> None:
        layers = [msgspec.structs.replace(layer, tensors=layer.tensors * 2) for layer in world.layers]
        self._refused(device, layers, world.setup.block_size, world.layout)

    def test_one_layer_of_many_that_differs(self, make_world: MakeWorld, device: Device) -> None:
        world = make_world(self.setup(turnings=(None,) * 4))
        other = make_world(self.setup(turnings=(None,) * 4, kv_heads=2, key_dim=18, value_dim=18))
        layers = [*world.layers[:3], other.layers[3]]
        self._refused(device, layers, world.setup.block_size, world.layout)

    def _refused(self, device: Device, layers: list[PagedLayer], block_size: int, layout: KVLayout) -> None:
        with pytest.raises(LayoutMismatch):
            device.attach(layers, block_size, layout)

    def test_a_device_is_attached_once(self, world: World) -> None:
        with pytest.raises(InvalidInput):
            world.device.attach(world.layers, world.setup.block_size, world.layout)
        world.load(world.chunks(3, 60))

    def test_nothing_is_copied_before_attach_and_pin(self, world: World, device: Device) -> None:
        self._copies_nothing(device, world)
        device.attach(world.layers, world.setup.block_size, world.layout)
        self._copies_nothing(device, world)

    def test_nothing_is_copied_after_close(self, world: World) -> None:
        world.device.close()
        self._copies_nothing(world.device, world)
        with pytest.raises(InvalidInput):
            world.device.pin(world.arena)

    def _copies_nothing(self, device: Device, world: World) -> None:
        for copy in (device.load, device.save):
            with pytest.raises(InvalidInput):
                copy(world.chunks(3, 60), world.block_ids)
        world.check()

    @pytest.mark.parametrize("name", NO_ARENAS)
    def test_an_arena_is_a_flat_array_of_bytes(self, world: World, name: str) -> None:
        with pytest.raises(InvalidInput):
            world.device.pin(NO_ARENAS[name])
        world.load(world.chunks(3, 60))

    def test_an_arena_that_is_read_only_serves_loads_only(self, world: World) -> None:
        world.arena = world.arena.copy()
        world.arena.flags.writeable = False
        world.device.pin(world.arena)
        world.load(world.chunks(3, 60))
        with pytest.raises(InvalidInput):
            world.device.save(world.chunks(3, 60), world.block_ids)
        world.check()

    def test_a_format_that_nobody_knows(self, world: World, device: Device) -> None:
        layers = [msgspec.structs.replace(layer, format=cast(PageFormat, "spiral")) for layer in world.layers]
        with pytest.raises(Unsupported):
            device.attach(layers, world.setup.block_size, world.layout)

    def test_what_is_not_served_is_refused(self) -> None:
        formats = [format for format in get_args(PageFormat) if format not in self.formats]
        dtypes = [dtype for dtype in ITEM_SIZES if dtype not in self.dtypes]
        if not formats and not dtypes:
            pytest.skip("this device serves all formats and types")
        for setup in (
            *(Setup(format=format, dtype=self.dtypes[0]) for format in formats),
            *(Setup(format=self.formats[0], dtype=dtype) for dtype in dtypes),
        ):
            device = self.create()
            with pytest.raises(Unsupported):
                World(device, self.torch_type, setup)
            device.close()
