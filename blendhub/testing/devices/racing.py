"""Tests that need the accelerator: the engine reads pages that a load must not change, while the load runs, and
overwrites pages that a save reads."""

from abc import ABC, abstractmethod
from contextlib import closing
from itertools import count
from typing import Any, ClassVar

import numpy as np
import torch

from blendhub.contracts import Device, PagedLayer, PageFormat, Rotation, Segment, Transfer
from blendhub.core.layout import KVLayout
from blendhub.core.spans import Span
from blendhub.devices import planes_of
from blendhub.testing.device_reference import page_shapes
from blendhub.testing.devices.base import harnesses
from blendhub.testing.devices.device_harness import DeviceSetup, Rotary
from blendhub.testing.sentences import holds

CHUNK, MOVED = 256, 999
WIDTHS = {"kv_heads": 8, "key_dim": 128, "value_dim": 128}


class RaceSuite(ABC):
    """Subclass it with a ``create`` that makes a device, and with the values of its accelerator."""

    contract: ClassVar[type] = Device

    torch_type: ClassVar[str]
    format: ClassVar[PageFormat]
    block: ClassVar[int]
    layers: ClassVar[int] = 8
    n_tokens: ClassVar[int] = 4096
    """Layers and tokens set how long a load takes: it must last long enough for reads beside it."""

    @abstractmethod
    def create(self) -> Device:
        """A new device, not attached to anything."""

    @holds("Other requests may be reading the skipped prefix, holes, the rest of a block and")
    def test_pages_that_others_read_never_change(self) -> None:
        accelerator, n_tokens = torch.get_device_module(self.torch_type), self.n_tokens
        layout = KVLayout(layers=self.layers, dtype="bfloat16", chunk_tokens=CHUNK, **WIDTHS)
        n_blocks = 3 * n_tokens // self.block
        cos_sin = Rotary(width=128, positions=n_tokens + MOVED).build().cos_sin.to(self.torch_type)
        shapes = page_shapes(self.format, n_blocks, self.block, layout)
        tensors = [
            tuple(torch.randn(shape).bfloat16().to(self.torch_type) for shape in shapes) for _ in range(self.layers)
        ]
        layers = [PagedLayer("layer", self.format, pages, Rotation(cos_sin, True)) for pages in tensors]
        planes = [plane for layer in layers for plane in planes_of(layer, self.block, layout)]
        starts = enumerate(range(0, n_tokens, CHUNK))
        segments = [Segment(Span(at, at + CHUNK), n * layout.shard_bytes, 0, at + MOVED) for n, at in starts]

        blocks = np.random.default_rng(2).permutation(n_blocks)[: n_tokens // self.block]
        skipped = n_tokens // 2 + 5
        written = set(blocks[skipped // self.block :].tolist())
        read_only = torch.tensor(sorted(set(range(n_blocks)) - written), device=self.torch_type)
        shared = torch.tensor([blocks[skipped // self.block]], device=self.torch_type)

        def read() -> tuple[torch.Tensor, torch.Tensor]:
            beginning = slice(0, skipped % self.block)
            return _checksums(planes, read_only, slice(None)), _checksums(planes, shared, beginning)

        before, reader, seen = read(), accelerator.Stream(), []
        with closing(self.create()) as device:
            device.attach(layers, self.block, layout)
            device.pin(np.zeros(len(segments) * layout.shard_bytes, np.uint8))
            accelerator.synchronize()
            device.load(segments, blocks, skipped).wait()  # kernels are compiled before reads race with them
            for _ in range(5):
                transfer = device.load(segments, blocks, skipped)
                for reads in count():
                    with accelerator.stream(reader):
                        seen.append(read())
                    if reads and transfer.done():
                        break
                transfer.wait()
            accelerator.synchronize()
        assert all(torch.equal(now, first) for pair in seen for now, first in zip(pair, before, strict=True))

    def _setup(self, n_blocks: int) -> DeviceSetup:
        sizes: Any = {"block_size": self.block, "chunk_tokens": CHUNK, "n_blocks": n_blocks, **WIDTHS}
        return DeviceSetup(format=self.format, dtype="bfloat16", n_shards=4, rotations=(None,) * 4, **sizes)

    @holds("Let the engine use the pages for something else:")
    def test_pages_that_a_save_has_released_may_change(self) -> None:
        transfers: list[Transfer] = []
        with harnesses(self.create, self.torch_type) as make:
            harness = make(self._setup(1024 // self.block + 4))
            segments = harness.chunks(0, 1024)

            def save() -> None:
                transfers.append(harness.device.save(segments, harness.block_ids))
                transfers[-1].release_pages()

            for _ in range(3):
                harness.reference.save(segments, harness.block_ids)
                harness.overwrite_pages(after=save)
                transfers[-1].wait()
                harness.check()

    @holds("Let the engine use the pages for something else:")
    def test_blocks_that_a_load_has_read_and_released_may_change(self) -> None:
        transfers: list[Transfer] = []
        n_blocks = 1024 // self.block
        with harnesses(self.create, self.torch_type) as make:
            harness = make(self._setup(2 * n_blocks + 1))
            harness.block_ids, harness.donors = np.arange(n_blocks), np.arange(n_blocks, 2 * n_blocks + 1)
            segments = [harness.copied(0, 1024, row=3, source=MOVED)]

            def load() -> None:
                transfers.append(harness.device.load(segments, harness.block_ids))
                transfers[-1].release_pages()

            for _ in range(3):
                harness.reference.load(segments, harness.block_ids)
                harness.overwrite_pages(slice(n_blocks, 2 * n_blocks + 1), after=load)
                transfers[-1].wait()
                harness.check()


def _checksums(planes: list[torch.Tensor], blocks: torch.Tensor, slots: slice) -> torch.Tensor:
    """A checksum for each plane of these slots of these blocks, which changes when a bit of them changes."""
    bits = torch.stack([plane[blocks][:, :, slots].contiguous().view(torch.int16).long() for plane in planes])
    weights = torch.arange(bits[0].numel(), device=bits.device).reshape(bits[0].shape) * 2654435761 + 1
    return (bits * weights).flatten(1).sum(1)
