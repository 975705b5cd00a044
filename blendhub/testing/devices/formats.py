"""Every page format and dtype is copied bit for bit."""

from typing import get_args

import pytest
from msgspec.structs import replace

from blendhub.contracts import PageFormat
from blendhub.layout import ITEM_SIZES
from blendhub.testing.devices.base import ROTATABLE_DTYPES, DeviceTests, MakeHarness
from blendhub.testing.devices.device_harness import Rotary, Setup

FORMATS: tuple[PageFormat, ...] = get_args(PageFormat)


class FormatTests(DeviceTests):
    @pytest.mark.parametrize("strided", [False, True], ids=["whole", "strided"])
    @pytest.mark.parametrize("dtype", ITEM_SIZES)
    @pytest.mark.parametrize("format", FORMATS)
    def test_every_bit_is_copied(
        self, make_harness: MakeHarness, format: PageFormat, dtype: str, strided: bool
    ) -> None:
        """NaN payloads and signed zeros included."""
        harness = make_harness(Setup(format=format, dtype=dtype, strided=strided))
        segments = [harness.segment(3, 20, row=5, source=90), harness.segment(31, 50, shard=1, source=31)]
        harness.load(segments, skip_prefix_n_tokens=4)
        harness.overwrite_pages()
        harness.save(segments)

    @pytest.mark.parametrize("strided", [False, True], ids=["whole", "strided"])
    @pytest.mark.parametrize("dtype", ROTATABLE_DTYPES)
    @pytest.mark.parametrize("format", FORMATS)
    def test_moved_keys_are_rotated(
        self, make_harness: MakeHarness, format: PageFormat, dtype: str, strided: bool
    ) -> None:
        harness = make_harness(Setup(format=format, dtype=dtype, strided=strided, rotations=(Rotary(), None)))
        harness.load([harness.segment(3, 20, row=5, source=90), harness.segment(31, 50, shard=1, source=31)], 4)

    @pytest.mark.parametrize("dims", [(1, 2, 2), (2, 16, 8), (1, 64, 64), (5, 6, 10), (2, 33, 1)])
    @pytest.mark.parametrize("format", FORMATS)
    def test_heads_and_widths(self, make_harness: MakeHarness, format: PageFormat, dims: tuple[int, int, int]) -> None:
        heads, key_dim, value_dim = dims
        harness = make_harness(
            self.setup(
                format=format,
                kv_heads=heads,
                key_dim=key_dim,
                value_dim=value_dim,
                rotations=(None, Rotary(width=2)),
                block_size=19,
                chunk_tokens=40,
                n_blocks=6,
            )
        )
        segments = [harness.segment(2, 41, row=1, source=7)]
        harness.load(segments)
        harness.overwrite_pages()
        harness.save(segments)

    def test_keys_and_values_of_a_joint_latent(self, make_harness: MakeHarness) -> None:
        """One vector for each token, of which only the last part is rotated."""
        harness = make_harness(self.setup(format="latent", key_dim=40, rotations=(Rotary(offset=32, neox=False),) * 2))
        harness.load(harness.chunks(3, 60, source=500), skip_prefix_n_tokens=10)
        harness.overwrite_pages()
        harness.save(harness.chunks(3, 60))

    @pytest.mark.parametrize("dtype", [dtype for dtype, size in ITEM_SIZES.items() if size == 1])
    def test_numbers_of_8_bits_may_be_kept_as_bytes(self, make_harness: MakeHarness, dtype: str) -> None:
        import torch

        is_rotatable = dtype in ROTATABLE_DTYPES
        harness = make_harness(self.setup(dtype=dtype, rotations=(Rotary() if is_rotatable else None, None)))
        as_bytes = [replace(one, tensors=tuple(t.view(torch.uint8) for t in one.tensors)) for one in harness.layers]
        harness.replace_device(self.create(), as_bytes)
        harness.load(harness.chunks(3, 60, source=100 if is_rotatable else None))
        harness.overwrite_pages()
        harness.save(harness.chunks(3, 60))

    def test_pages_of_all_layers_may_share_one_allocation(self, make_harness: MakeHarness) -> None:
        """Each block holds all layers, as in engines with several KV cache groups."""
        import torch

        harness = make_harness(self.setup(format="packed_tokens"))
        shared = torch.stack([layer.tensors[0] for layer in harness.layers], dim=1)
        layers = [replace(one, tensors=(shared[:, at],)) for at, one in enumerate(harness.layers)]
        harness.replace_device(self.create(), layers)
        harness.start_load(harness.chunks(3, 60)).wait()
        for at, layer in enumerate(harness.layers):
            layer.tensors[0].copy_(shared[:, at])
        harness.check()
