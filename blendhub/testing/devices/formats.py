"""Every page format and dtype is copied bit for bit, and moved keys are rotated within one rounding."""

from itertools import product

import torch
from msgspec.structs import replace

from blendhub.contracts import PageFormat, Rotation
from blendhub.core.layout import ITEM_SIZES
from blendhub.testing.devices.base import DeviceTests, MakeHarness
from blendhub.testing.devices.device_harness import DeviceSetup, Rotary
from blendhub.testing.sentences import holds


@holds("Moved keys are rotated by the angle between the two positions:")
class FormatTests(DeviceTests):
    def test_every_bit_is_copied_and_moved_keys_are_rotated(
        self, make_harness: MakeHarness, format: PageFormat
    ) -> None:
        """NaN payloads and signed zeros are copied too, where no key is rotated. Each dtype is in strided pages and in
        others, with a rotation in one of the two."""
        for (number, dtype), rotates in product(enumerate(self.dtypes), (False, True)):
            rotary = Rotary() if rotates and dtype in self.rotatable_dtypes else None
            strided = rotates == bool(number % 2)
            harness = make_harness(DeviceSetup(format=format, dtype=dtype, strided=strided, rotations=(rotary, None)))
            segments = [harness.segment(3, 20, row=5, source=90), harness.segment(31, 50, shard=1, source=31)]
            harness.load(segments, skip_prefix_n_tokens=4)
            harness.load([harness.copied(3, 20, row=5, source=90), harness.copied(31, 50)], skip_prefix_n_tokens=4)
            harness.overwrite_pages()
            harness.save(segments)

    def test_pages_of_all_layers_may_share_one_allocation(self, make_harness: MakeHarness, format: PageFormat) -> None:
        """Engines with several KV cache groups have such pages."""
        harness = make_harness(self.setup(format=format))
        shared = [torch.stack(alike, dim=1) for alike in zip(*(layer.tensors for layer in harness.layers), strict=True)]
        layers = [
            replace(layer, tensors=tuple(tensor[:, at] for tensor in shared)) for at, layer in enumerate(harness.layers)
        ]
        harness.replace_device(self.create(), layers)
        harness.start_load(harness.chunks(3, 60)).wait()
        for layer, views in zip(harness.layers, layers, strict=True):
            for tensor, view in zip(layer.tensors, views.tensors, strict=True):
                tensor.copy_(view)
        harness.check()

    @holds("Values are copied bit for bit, and so are keys that stay at their position")
    def test_numbers_of_8_bits_may_be_kept_as_bytes(self, make_harness: MakeHarness) -> None:
        for dtype in self.dtypes:
            if ITEM_SIZES[dtype] > 1:
                continue
            rotation = Rotary() if dtype in self.rotatable_dtypes else None
            harness = make_harness(self.setup(dtype=dtype, rotations=(rotation, None)))
            as_bytes = [replace(one, tensors=tuple(t.view(torch.uint8) for t in one.tensors)) for one in harness.layers]
            harness.replace_device(self.create(), as_bytes)
            harness.load(harness.chunks(3, 60, source=100 if rotation else None))
            harness.overwrite_pages()
            harness.save(harness.chunks(3, 60))

    @holds("Values too large for an 8-bit dtype saturate.")
    def test_values_too_large_for_8_bits_saturate(self, make_harness: MakeHarness) -> None:
        for dtype in self.rotatable_dtypes:
            if ITEM_SIZES[dtype] == 1:
                harness = make_harness(self.setup(dtype=dtype, rotations=(Rotary(width=12),)))
                pages = harness.layers[0].tensors[0].zero_()
                harness.arena[:] = torch.tensor(torch.finfo(pages.dtype).max).to(pages.dtype).view(torch.uint8).numpy()
                harness.device.load([harness.segment(0, 20, source=300)], harness.block_ids).wait()
                assert pages.float().isfinite().all()

    def test_each_layer_has_its_own_rotation(self, make_harness: MakeHarness) -> None:
        """None, one shared with another layer, other bases, widths and pairings, one table at several offsets."""
        local, part = Rotary(width=12, base=500.0), Rotary(width=4, offset=8, neox=False)
        others = Rotary(width=4, offset=8), Rotary(width=4, offset=1), Rotary(width=4, offset=1, neox=False)
        harness = make_harness(self.setup(rotations=(local, None, Rotary(width=12), local, None, part, *others, local)))
        harness.load(harness.chunks(3, 60, source=111))
        harness.load([harness.copied(3, 60, source=111)])

    def test_positions_up_to_the_last_row_of_the_table(self, make_harness: MakeHarness) -> None:
        for neox, positions in ((True, 140_000), (False, 140_000), (True, 60)):
            harness = make_harness(self.setup(rotations=(Rotary(width=8, neox=neox, positions=positions),)))
            harness.load([harness.segment(0, 20, source=positions - 20), harness.segment(50, 60, shard=1, source=0)])

    def test_a_table_may_be_part_of_a_wider_one(self, make_harness: MakeHarness) -> None:
        harness = make_harness(self.setup(rotations=(Rotary(width=12), Rotary(width=12))))
        table = Rotary(width=12).build().cos_sin
        wider = torch.cat([table, torch.full((len(table), 8), torch.nan)], dim=1).to(self.torch_type)
        rotation = Rotation(wider[:, :12], neox=True)
        harness.replace_device(self.create(), [replace(layer, rotation=rotation) for layer in harness.layers])
        harness.load(harness.chunks(3, 60, source=100))
