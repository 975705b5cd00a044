"""Every format and type of pages, bit for bit."""

from typing import get_args

import pytest
from msgspec.structs import replace

from blendhub.contracts import PageFormat
from blendhub.layout import ITEM_SIZES
from blendhub.testing.devices.base import NUMBERS, DeviceTests, MakeWorld
from blendhub.testing.devices.world import Setup, Turning

FORMATS: tuple[PageFormat, ...] = get_args(PageFormat)


class FormatTests(DeviceTests):
    @pytest.mark.parametrize("strided", [False, True], ids=["whole", "strided"])
    @pytest.mark.parametrize("dtype", ITEM_SIZES)
    @pytest.mark.parametrize("format", FORMATS)
    def test_every_bit_is_copied(self, make_world: MakeWorld, format: PageFormat, dtype: str, strided: bool) -> None:
        """Also the bits of what is not a number, and of the two zeros."""
        world = make_world(Setup(format=format, dtype=dtype, strided=strided))
        segments = [world.segment(3, 20, row=5, source=90), world.segment(31, 50, shard=1, source=31)]
        world.load(segments, skip_prefix_n_tokens=4)
        world.overwrite_pages()
        world.save(segments)

    @pytest.mark.parametrize("strided", [False, True], ids=["whole", "strided"])
    @pytest.mark.parametrize("dtype", NUMBERS)
    @pytest.mark.parametrize("format", FORMATS)
    def test_keys_are_turned(self, make_world: MakeWorld, format: PageFormat, dtype: str, strided: bool) -> None:
        world = make_world(Setup(format=format, dtype=dtype, strided=strided, turnings=(Turning(), None)))
        world.load([world.segment(3, 20, row=5, source=90), world.segment(31, 50, shard=1, source=31)], 4)

    @pytest.mark.parametrize("dims", [(1, 2, 2), (2, 16, 8), (1, 64, 64), (5, 6, 10), (2, 33, 1)])
    @pytest.mark.parametrize("format", FORMATS)
    def test_heads_and_widths(self, make_world: MakeWorld, format: PageFormat, dims: tuple[int, int, int]) -> None:
        heads, key_dim, value_dim = dims
        world = make_world(
            self.setup(
                format=format,
                kv_heads=heads,
                key_dim=key_dim,
                value_dim=value_dim,
                turnings=(None, Turning(width=2)),
                block_size=19,
                chunk_tokens=40,
                n_blocks=6,
            )
        )
        segments = [world.segment(2, 41, row=1, source=7)]
        world.load(segments)
        world.overwrite_pages()
        world.save(segments)

    def test_keys_and_values_of_a_joint_latent(self, make_world: MakeWorld) -> None:
        """One vector a token, whose last part turns."""
        world = make_world(self.setup(format="latent", key_dim=40, turnings=(Turning(offset=32, neox=False),) * 2))
        world.load(world.chunks(3, 60, source=500), skip_prefix_n_tokens=10)
        world.overwrite_pages()
        world.save(world.chunks(3, 60))

    @pytest.mark.parametrize("dtype", [dtype for dtype, size in ITEM_SIZES.items() if size == 1])
    def test_numbers_of_8_bits_may_be_kept_as_bytes(self, make_world: MakeWorld, dtype: str) -> None:
        import torch

        turns = dtype in NUMBERS
        world = make_world(self.setup(dtype=dtype, turnings=(Turning() if turns else None, None)))
        as_bytes = [replace(one, tensors=tuple(t.view(torch.uint8) for t in one.tensors)) for one in world.layers]
        world.go_on_with(self.create(), as_bytes)
        world.load(world.chunks(3, 60, source=100 if turns else None))
        world.overwrite_pages()
        world.save(world.chunks(3, 60))

    def test_pages_of_all_layers_may_share_one_allocation(self, make_world: MakeWorld) -> None:
        """Layer beside layer in each block, as engines with several groups of layers have them."""
        import torch

        world = make_world(self.setup(format="packed_tokens"))
        shared = torch.stack([layer.tensors[0] for layer in world.layers], dim=1)
        world.go_on_with(self.create(), [replace(one, tensors=(shared[:, at],)) for at, one in enumerate(world.layers)])
        world.start_load(world.chunks(3, 60)).wait()
        for at, layer in enumerate(world.layers):
            layer.tensors[0].copy_(shared[:, at])
        world.check()
