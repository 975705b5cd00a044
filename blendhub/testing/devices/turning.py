"""Keys that move are turned, within one rounding of the reference; all else stays bit for bit."""

import pytest
from msgspec.structs import replace

from blendhub.contracts import Rotation
from blendhub.testing.devices.base import NUMBERS, DeviceTests, MakeWorld
from blendhub.testing.devices.world import Turning

TURNINGS = {
    "neox": Turning(width=12),
    "neighbours": Turning(width=12, neox=False),
    "partial": Turning(width=6),
    "partial, neighbours": Turning(width=6, neox=False),
    "with offset": Turning(width=4, offset=5),
    "at the end": Turning(width=4, offset=8, neox=False),
    "scaled up": Turning(width=12, scale=1.37),
    "scaled down": Turning(width=12, scale=0.25, neox=False),
    "one pair": Turning(width=2, offset=3),
}


class TurningTests(DeviceTests):
    @pytest.mark.parametrize("dtype", NUMBERS)
    @pytest.mark.parametrize("name", TURNINGS)
    def test_every_rotation(self, make_world: MakeWorld, name: str, dtype: str) -> None:
        world = make_world(self.setup(dtype=dtype, turnings=(TURNINGS[name],)))
        world.load([world.segment(3, 20, row=5, source=200), world.segment(31, 50, shard=1, source=0)])

    def test_layers_turn_each_in_its_own_way(self, make_world: MakeWorld) -> None:
        """Or not at all; as another layer; by another base, width or pairing; by one table at several offsets."""
        local, part = Turning(width=12, base=500.0), Turning(width=4, offset=8, neox=False)
        others = (Turning(width=4, offset=8), Turning(width=4, offset=1), Turning(width=4, offset=1, neox=False))
        turnings = (local, None, Turning(width=12), local, None, part, *others, local)
        world = make_world(self.setup(turnings=turnings))
        world.load(world.chunks(3, 60, source=111), skip_prefix_n_tokens=7)

    def test_keys_that_stay_are_not_turned(self, make_world: MakeWorld) -> None:
        world = make_world(self.setup(turnings=(Turning(), Turning(neox=False))))
        world.load(world.chunks(3, 60))

    def test_moved_and_unmoved_segments_side_by_side(self, make_world: MakeWorld) -> None:
        world = make_world(self.setup(turnings=(Turning(), None)))
        world.load(
            [
                world.segment(3, 11, source=3),
                world.segment(11, 15, shard=1, source=12),
                world.segment(15, 17, shard=2, row=9, source=15),
                world.segment(17, 40, shard=3, source=16),
            ]
        )

    @pytest.mark.parametrize("skipped", [5, 26, 27, 40])
    def test_what_follows_a_skipped_prefix_is_turned_from_its_own_position(
        self, make_world: MakeWorld, skipped: int
    ) -> None:
        world = make_world(self.setup(turnings=(Turning(),)))
        world.load(world.chunks(3, 60, source=500), skip_prefix_n_tokens=skipped)

    @pytest.mark.parametrize("neox", [True, False])
    def test_far_positions(self, make_world: MakeWorld, neox: bool) -> None:
        """Up to the last row of the table."""
        world = make_world(self.setup(turnings=(Turning(width=8, neox=neox, positions=140_000),)))
        world.load([world.segment(0, 20, source=139_980), world.segment(30, 40, shard=1, source=131_072)])

    def test_the_last_position_of_a_short_table(self, make_world: MakeWorld) -> None:
        world = make_world(self.setup(turnings=(Turning(positions=60),)))
        world.load([world.segment(50, 60, source=0), world.segment(0, 10, shard=1, source=50)])

    def test_saving_does_not_turn(self, make_world: MakeWorld) -> None:
        world = make_world(self.setup(turnings=(Turning(), None)))
        world.save(world.chunks(3, 60, source=500))

    def test_turning_there_and_back_comes_close(self, make_world: MakeWorld) -> None:
        """Loaded 100 further on, saved, and loaded where it was: each step within its rounding."""
        world = make_world(self.setup(turnings=(Turning(), None), n_blocks=30))
        world.load([world.segment(102, 120, source=2)])
        world.save([world.segment(102, 120, shard=1)])
        world.load([world.segment(2, 20, shard=1, source=102)])

    def test_a_table_may_be_part_of_a_wider_one(self, make_world: MakeWorld) -> None:
        import torch

        world = make_world(self.setup(turnings=(Turning(width=12), Turning(width=12))))
        table = Turning(width=12).rotation().cos_sin
        wider = torch.cat([table, torch.full((len(table), 8), torch.nan)], dim=1).to(self.torch_type)
        rotation = Rotation(wider[:, :12], neox=True)
        world.go_on_with(self.create(), [replace(layer, rotation=rotation) for layer in world.layers])
        world.load(world.chunks(3, 60, source=100))
