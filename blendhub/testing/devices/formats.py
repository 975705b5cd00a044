"""Every page format and dtype is copied bit for bit."""

from itertools import product

from msgspec.structs import replace

from blendhub.contracts import PageFormat
from blendhub.testing.devices.base import ROTATABLE_DTYPES, DeviceTests, MakeHarness
from blendhub.testing.devices.device_harness import Rotary, Setup
from blendhub.testing.sentences import holds

DIMS = [(1, 2, 2), (2, 16, 8), (1, 64, 64), (5, 6, 10), (2, 33, 1)]
"""Heads, and widths of their keys and values."""


@holds("Values are copied bit for bit, and so are keys that stay at their position")
class FormatTests(DeviceTests):
    def test_every_bit_is_copied(self, make_harness: MakeHarness, format: PageFormat) -> None:
        """NaN payloads and signed zeros included."""
        for dtype, strided in product(self.dtypes, (False, True)):
            harness = make_harness(Setup(format=format, dtype=dtype, strided=strided))
            segments = [harness.segment(3, 20, row=5, source=90), harness.segment(31, 50, shard=1, source=31)]
            harness.load(segments, skip_prefix_n_tokens=4)
            harness.overwrite_pages()
            harness.save(segments)

    @holds("Moved keys are rotated by the angle between the two positions:")
    def test_moved_keys_are_rotated(self, make_harness: MakeHarness, format: PageFormat) -> None:
        for dtype, strided in product(self.rotatable_dtypes, (False, True)):
            harness = make_harness(Setup(format=format, dtype=dtype, strided=strided, rotations=(Rotary(), None)))
            harness.load([harness.segment(3, 20, row=5, source=90), harness.segment(31, 50, shard=1, source=31)], 4)

    def test_heads_and_widths(self, make_harness: MakeHarness, format: PageFormat) -> None:
        sizes = {"block_size": 19, "chunk_tokens": 40, "n_blocks": 6}
        for heads, key_dim, value_dim in DIMS:
            dims = {"kv_heads": heads, "key_dim": key_dim, "value_dim": value_dim}
            harness = make_harness(self.setup(format=format, rotations=(None, Rotary(width=2)), **dims, **sizes))
            segments = [harness.segment(2, 41, row=1, source=7)]
            harness.load(segments)
            harness.overwrite_pages()
            harness.save(segments)

    @holds("The first item of the rotated part of a key; items outside it are not rotated.")
    def test_only_the_last_part_of_the_keys_is_rotated(self, make_harness: MakeHarness, format: PageFormat) -> None:
        """As of a joint latent."""
        harness = make_harness(self.setup(format=format, key_dim=40, rotations=(Rotary(offset=32, neox=False),) * 2))
        harness.load(harness.chunks(3, 60, source=500), skip_prefix_n_tokens=10)
        harness.overwrite_pages()
        harness.save(harness.chunks(3, 60))

    def test_numbers_of_8_bits_may_be_kept_as_bytes(self, make_harness: MakeHarness, dtype_of_8_bits: str) -> None:
        import torch

        is_rotatable = dtype_of_8_bits in ROTATABLE_DTYPES
        harness = make_harness(self.setup(dtype=dtype_of_8_bits, rotations=(Rotary() if is_rotatable else None, None)))
        as_bytes = [replace(one, tensors=tuple(t.view(torch.uint8) for t in one.tensors)) for one in harness.layers]
        harness.replace_device(self.create(), as_bytes)
        harness.load(harness.chunks(3, 60, source=100 if is_rotatable else None))
        harness.overwrite_pages()
        harness.save(harness.chunks(3, 60))

    def test_pages_of_all_layers_may_share_one_allocation(self, make_harness: MakeHarness, format: PageFormat) -> None:
        """As in engines with several KV cache groups."""
        import torch

        harness = make_harness(self.setup(format=format))
        shared = [torch.stack(alike, dim=1) for alike in zip(*(layer.tensors for layer in harness.layers), strict=True)]
        layers = [
            replace(layer, tensors=tuple(one[:, at] for one in shared)) for at, layer in enumerate(harness.layers)
        ]
        harness.replace_device(self.create(), layers)
        harness.start_load(harness.chunks(3, 60)).wait()
        for layer, views in zip(harness.layers, layers, strict=True):
            for tensor, view in zip(layer.tensors, views.tensors, strict=True):
                tensor.copy_(view)
        harness.check()
