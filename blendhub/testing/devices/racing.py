"""Tests that need the accelerator: the engine reads pages that a load must not change, while the load runs."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import count
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch

from blendhub.contracts import Device, PagedLayer, PageFormat, Rotation, Segment
from blendhub.core.layout import KVLayout
from blendhub.core.spans import Span
from blendhub.devices import StreamDevice, planes_of
from blendhub.testing.device_reference import page_shapes
from blendhub.testing.devices.device_harness import occupy_engine

LAYERS, HEADS, WIDTH, CHUNK, CHUNKS = 8, 8, 128, 256, 16
N_TOKENS = CHUNK * CHUNKS
LAYOUT = KVLayout(layers=LAYERS, kv_heads=HEADS, key_dim=WIDTH, value_dim=WIDTH, dtype="bfloat16", chunk_tokens=CHUNK)


class BusyDevice(NamedTuple):
    """A device that is attached to pages of an accelerator, and an arena of random numbers."""

    device: Device
    layers: list[PagedLayer]
    planes: list[torch.Tensor]
    """Each layer's keys and values, as ``[blocks, heads, tokens, width]``."""
    arena: npt.NDArray[np.uint8]

    def segments(self, moved: int) -> list[Segment]:
        """All chunks, one behind the other, whose keys were stored ``moved`` positions further on."""
        starts = enumerate(range(0, N_TOKENS, CHUNK))
        return [Segment(Span(at, at + CHUNK), n * LAYOUT.shard_bytes, 0, at + moved) for n, at in starts]


class RaceSuite(ABC):
    """Subclass it with a ``create`` that makes a device, and with the values of its accelerator."""

    torch_type: ClassVar[str]
    format: ClassVar[PageFormat]
    block: ClassVar[int]

    @abstractmethod
    def create(self) -> Device:
        """A new device, not attached to anything."""

    def occupy(self) -> None:
        """Submit work to the engine's stream that takes about a tenth of a second."""
        occupy_engine(self.torch_type)

    @property
    def accelerator(self) -> Any:
        return torch.get_device_module(self.torch_type)

    @pytest.fixture
    def busy(self) -> Iterator[BusyDevice]:
        angles = torch.outer(torch.arange(N_TOKENS + 2048), 10_000.0 ** (-torch.arange(WIDTH // 2) / (WIDTH // 2)))
        rotation = Rotation(torch.cat([angles.cos(), angles.sin()], 1).float().to(self.torch_type), True)
        shapes = page_shapes(self.format, 3 * N_TOKENS // self.block, self.block, LAYOUT)
        layers = []
        for number in range(LAYERS):
            tensors = tuple(torch.randn(shape).bfloat16().to(self.torch_type) for shape in shapes)
            layers.append(PagedLayer(f"layer {number}", self.format, tensors, rotation))
        device = self.create()
        device.attach(layers, self.block, LAYOUT)
        numbers = np.random.default_rng(1).normal(size=CHUNKS * LAYOUT.shard_bytes // 2).astype(np.float32)
        arena = torch.from_numpy(numbers).bfloat16().view(torch.uint8).numpy()
        device.pin(arena)
        if isinstance(device, StreamDevice):
            device.wait_until_pinned()
        planes = [plane for layer in layers for plane in planes_of(layer, self.block, LAYOUT)]
        yield BusyDevice(device, layers, planes, arena)
        device.close()

    def test_pages_that_others_read_never_change(self, busy: BusyDevice) -> None:
        n_blocks = 3 * N_TOKENS // self.block
        blocks = np.random.default_rng(2).permutation(n_blocks)[: N_TOKENS // self.block]
        skipped = N_TOKENS // 2 + 5
        written = set(blocks[skipped // self.block :].tolist())
        read_only = torch.tensor(sorted(set(range(n_blocks)) - written), device=self.torch_type)
        shared = torch.tensor([blocks[skipped // self.block]], device=self.torch_type)
        everything, before = slice(None), slice(0, skipped % self.block)

        def read() -> tuple[torch.Tensor, torch.Tensor]:
            return _checksums(busy.planes, read_only, everything), _checksums(busy.planes, shared, before)

        segments, known = busy.segments(999), read()
        reader, seen = self.accelerator.Stream(), []
        self.accelerator.synchronize()
        busy.device.load(segments, blocks, skipped).wait()  # kernels are compiled before reads race with them
        for _ in range(5):
            transfer = busy.device.load(segments, blocks, skipped)
            for reads in count():
                with self.accelerator.stream(reader):
                    seen.append(read())
                if reads and transfer.done():
                    break
            transfer.wait()
        self.accelerator.synchronize()
        for found in seen:
            assert all(torch.equal(one, other) for one, other in zip(found, known, strict=True))

    def test_a_transfer_follows_work_that_the_engine_has_yet_to_do(self, busy: BusyDevice) -> None:
        """The engine's stream is busy when it submits writes to pages and the device a save of them."""
        blocks, segments = np.arange(N_TOKENS // self.block), busy.segments(0)
        busy.device.save(segments, blocks).wait()
        self.occupy()
        for number, layer in enumerate(busy.layers):
            for tensor in layer.tensors:
                tensor.fill_(number + 1)
        transfer = busy.device.save(segments, blocks)
        assert not transfer.done()
        transfer.wait()
        found = torch.from_numpy(busy.arena).view(torch.bfloat16).reshape(CHUNKS, LAYERS, -1)
        for number in range(LAYERS):
            assert (found[:, number] == number + 1).all()
        busy.device.load(segments, blocks).wait()
        self.occupy()
        busy.arena[:] = 0
        reads = [plane[: len(blocks)].clone() for plane in busy.planes]  # before the load, in the engine's stream
        busy.device.load(segments, blocks).wait()
        for number, plane in enumerate(reads):
            assert (plane == number // 2 + 1).all()
        assert all((plane[: len(blocks)] == 0).all() for plane in busy.planes)


def _checksums(planes: list[torch.Tensor], blocks: torch.Tensor, slots: slice) -> torch.Tensor:
    """A checksum for each plane of these slots of these blocks, which changes when a bit of them changes."""
    bits = torch.stack([plane[blocks][:, :, slots].contiguous().view(torch.int16).long() for plane in planes])
    weights = torch.arange(bits[0].numel(), device=bits.device).reshape(bits[0].shape) * 2654435761 + 1
    return (bits * weights).flatten(1).sum(1)
