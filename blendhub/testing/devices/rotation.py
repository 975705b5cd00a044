"""Moved keys are rotated within one rounding of the reference; everything else is copied bit for bit."""

from msgspec.structs import replace

from blendhub.contracts import Rotation
from blendhub.testing.devices.base import DeviceTests, MakeHarness
from blendhub.testing.devices.device_harness import Rotary
from blendhub.testing.sentences import holds

ROTATIONS = {
    "neox": Rotary(width=12),
    "interleaved": Rotary(width=12, neox=False),
    "partial": Rotary(width=6),
    "partial, interleaved": Rotary(width=6, neox=False),
    "with offset": Rotary(width=4, offset=5),
    "at the end": Rotary(width=4, offset=8, neox=False),
    "scaled up": Rotary(width=12, scale=1.37),
    "scaled down": Rotary(width=12, scale=0.25, neox=False),
    "one pair": Rotary(width=2, offset=3),
}


@holds("Moved keys are rotated by the angle between the two positions:")
class RotationTests(DeviceTests):
    def test_every_rotation(self, make_harness: MakeHarness, rotatable_dtype: str) -> None:
        for rotary in ROTATIONS.values():
            harness = make_harness(self.setup(dtype=rotatable_dtype, rotations=(rotary,)))
            harness.load([harness.segment(3, 20, row=5, source=200), harness.segment(31, 50, shard=1, source=0)])

    def test_each_layer_has_its_own_rotation(self, make_harness: MakeHarness) -> None:
        """None, one shared with another layer, other bases, widths and pairings, one table at several offsets."""
        local, part = Rotary(width=12, base=500.0), Rotary(width=4, offset=8, neox=False)
        others = (
            Rotary(width=4, offset=8),
            Rotary(width=4, offset=1),
            Rotary(width=4, offset=1, neox=False),
        )
        rotations = (local, None, Rotary(width=12), local, None, part, *others, local)
        harness = make_harness(self.setup(rotations=rotations))
        harness.load(harness.chunks(3, 60, source=111), skip_prefix_n_tokens=7)

    @holds("Values are copied bit for bit, and so are keys that stay at their position")
    def test_unmoved_keys_are_not_rotated(self, make_harness: MakeHarness) -> None:
        harness = make_harness(self.setup(rotations=(Rotary(), Rotary(neox=False))))
        harness.load(harness.chunks(3, 60))

    def test_moved_and_unmoved_segments_side_by_side(self, make_harness: MakeHarness) -> None:
        harness = make_harness(self.setup(rotations=(Rotary(), None)))
        harness.load(
            [
                harness.segment(3, 11, source=3),
                harness.segment(11, 15, shard=1, source=12),
                harness.segment(15, 17, shard=2, row=9, source=15),
                harness.segment(17, 40, shard=3, source=16),
            ]
        )

    def test_tokens_after_a_skipped_prefix_are_rotated_from_their_own_position(self, make_harness: MakeHarness) -> None:
        harness = make_harness(self.setup(rotations=(Rotary(),)))
        for skipped in (5, 26, 27, 40):
            harness.overwrite_pages()
            harness.load(harness.chunks(3, 60, source=500), skip_prefix_n_tokens=skipped)

    def test_far_positions(self, make_harness: MakeHarness) -> None:
        """Up to the last row of the table."""
        for neox in (True, False):
            harness = make_harness(self.setup(rotations=(Rotary(width=8, neox=neox, positions=140_000),)))
            harness.load([harness.segment(0, 20, source=139_980), harness.segment(30, 40, shard=1, source=131_072)])

    def test_the_last_position_of_a_short_table(self, make_harness: MakeHarness) -> None:
        harness = make_harness(self.setup(rotations=(Rotary(positions=60),)))
        harness.load([harness.segment(50, 60, source=0), harness.segment(0, 10, shard=1, source=50)])

    @holds("Keys are not rotated, and ``source_start`` is ignored.")
    def test_saving_does_not_rotate(self, make_harness: MakeHarness) -> None:
        harness = make_harness(self.setup(rotations=(Rotary(), None)))
        harness.save(harness.chunks(3, 60, source=500))

    def test_rotating_forth_and_back_stays_within_rounding(self, make_harness: MakeHarness) -> None:
        """Loaded 100 further on, saved, and loaded where it was: each step within its rounding."""
        harness = make_harness(self.setup(rotations=(Rotary(), None), n_blocks=30))
        harness.load([harness.segment(102, 120, source=2)])
        harness.save([harness.segment(102, 120, shard=1)])
        harness.load([harness.segment(2, 20, shard=1, source=102)])

    def test_a_table_may_be_part_of_a_wider_one(self, make_harness: MakeHarness) -> None:
        import torch

        harness = make_harness(self.setup(rotations=(Rotary(width=12), Rotary(width=12))))
        table = Rotary(width=12).build().cos_sin
        wider = torch.cat([table, torch.full((len(table), 8), torch.nan)], dim=1).to(self.torch_type)
        rotation = Rotation(wider[:, :12], neox=True)
        harness.replace_device(self.create(), [replace(layer, rotation=rotation) for layer in harness.layers])
        harness.load(harness.chunks(3, 60, source=100))
