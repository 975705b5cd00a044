"""On a GPU: the engine reads pages that a load must not change, while the load runs."""

from itertools import count

import numpy as np
import pytest
import torch
from blendhub_cuda.device import CudaDevice
from blendhub_cuda.options import CudaOptions

from blendhub import Span
from blendhub.contracts import PagedLayer, Rotation, Segment
from blendhub.layout import KVLayout

pytestmark = pytest.mark.cuda

LAYERS, HEADS, WIDTH, BLOCK, CHUNK, CHUNKS = 8, 8, 128, 16, 256, 16
N_TOKENS = CHUNK * CHUNKS
N_BLOCKS = 3 * N_TOKENS // BLOCK


def layout_and_arena():
    layout = KVLayout(
        layers=LAYERS, kv_heads=HEADS, key_dim=WIDTH, value_dim=WIDTH, dtype="bfloat16", chunk_tokens=CHUNK
    )
    random = np.random.default_rng(1)
    arena = torch.from_numpy(random.normal(size=CHUNKS * layout.shard_bytes // 2).astype(np.float32))
    return layout, arena.to(torch.bfloat16).view(torch.uint8).numpy()


def device_with_pages(layout):
    angles = torch.outer(torch.arange(N_TOKENS + 2048), 10_000.0 ** (-torch.arange(WIDTH // 2) / (WIDTH // 2)))
    rotation = Rotation(torch.cat([angles.cos(), angles.sin()], 1).float().cuda(), True)
    pages = [torch.randn(N_BLOCKS, HEADS, BLOCK, 2 * WIDTH, device="cuda").bfloat16() for _ in range(LAYERS)]
    device = CudaDevice(CudaOptions())
    layers = [PagedLayer(f"layer {i}", "packed_heads", (one,), rotation) for i, one in enumerate(pages)]
    device.attach(layers, BLOCK, layout)
    return device, pages


def checksums(pages, blocks, slots):
    """A checksum for each layer of these slots of these blocks, which changes when a bit of them changes."""
    bits = torch.stack([one[blocks][:, :, slots].contiguous().view(torch.int16).long() for one in pages])
    weights = torch.arange(bits[0].numel(), device=bits.device).reshape(bits[0].shape) * 2654435761 + 1
    return (bits * weights).flatten(1).sum(1)


def test_pages_that_others_read_never_change():
    layout, arena = layout_and_arena()
    device, pages = device_with_pages(layout)
    device.pin(arena)
    blocks = np.random.default_rng(2).permutation(N_BLOCKS)[: N_TOKENS // BLOCK]
    skipped = N_TOKENS // 2 + 5
    read_only = torch.tensor(sorted(set(range(N_BLOCKS)) - set(blocks[skipped // BLOCK :].tolist())), device="cuda")
    shared = torch.tensor([blocks[skipped // BLOCK]], device="cuda")
    everything, before = slice(None), slice(0, skipped % BLOCK)
    segments = [
        Segment(Span(at, at + CHUNK), number * layout.shard_bytes, 0, at + 999)
        for number, at in enumerate(range(0, N_TOKENS, CHUNK))
    ]
    known = checksums(pages, read_only, everything), checksums(pages, shared, before)
    reader, seen = torch.cuda.Stream(), []
    torch.cuda.synchronize()
    device.load(segments, blocks, skipped).wait()  # compiles the kernels before the reads are timed against them
    for _ in range(5):
        transfer = device.load(segments, blocks, skipped)
        for reads in count():
            with torch.cuda.stream(reader):
                seen.append((checksums(pages, read_only, everything), checksums(pages, shared, before)))
            if reads and transfer.done():
                break
        transfer.wait()
    torch.cuda.synchronize()
    for found in seen:
        assert all(torch.equal(one, other) for one, other in zip(found, known, strict=True))
    device.close()


def test_a_transfer_follows_work_that_the_engine_has_yet_to_do():
    """The engine's stream is busy when it submits writes to pages and the device a save of them."""
    layout, arena = layout_and_arena()
    device, pages = device_with_pages(layout)
    device.pin(arena)
    blocks = np.arange(N_TOKENS // BLOCK)
    segments = [
        Segment(Span(at, at + CHUNK), number * layout.shard_bytes, 0, at)
        for number, at in enumerate(range(0, N_TOKENS, CHUNK))
    ]
    device.save(segments, blocks).wait()
    torch.cuda._sleep(200_000_000)
    for number, one in enumerate(pages):
        one.fill_(number + 1)
    transfer = device.save(segments, blocks)
    assert not transfer.done()
    transfer.wait()
    found = torch.from_numpy(arena).view(torch.bfloat16).reshape(CHUNKS, LAYERS, -1)
    for number in range(LAYERS):
        assert (found[:, number] == number + 1).all()
    device.load(segments, blocks).wait()
    torch.cuda._sleep(200_000_000)
    arena[:] = 0
    reads = [one[torch.from_numpy(blocks).cuda()].clone() for one in pages]  # before the load, in the engine's stream
    device.load(segments, blocks).wait()
    for number, one in enumerate(reads):
        assert (one == number + 1).all()
    assert all((one[: len(blocks)] == 0).all() for one in pages)
    device.close()
