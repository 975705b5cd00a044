"""What ``Device`` checks for every device, beyond what the suite requires of any; and in how few batches a transfer is
planned. That each token lies in one of them, at its place, the suites of devices show."""

from cProfile import Profile
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="pages are tensors: pip install torch")

import torch
from blendhub_cpu import CpuOptions
from blendhub_cpu.device import CpuDevice
from msgspec.structs import replace

from blendhub.contracts import PagedLayer, Rotation, Segment
from blendhub.core.errors import BrokenContract, InvalidInput, LayoutMismatch, Unsupported
from blendhub.core.layout import KVLayout
from blendhub.core.spans import Span
from blendhub.devices import batches, read_pages
from blendhub.testing.devices.device_harness import DeviceSetup, Rotary

SETUP = DeviceSetup()
BLOCK, LAYOUT = SETUP.block_size, SETUP.layout()
PAGES = torch.zeros(SETUP.n_blocks, SETUP.kv_heads, BLOCK, SETUP.key_dim + SETUP.value_dim)
GAPS = torch.zeros(SETUP.n_blocks, 3, 24, 8).transpose(2, 3)


class FewPages(CpuDevice):
    formats = ("packed_heads", "split")
    dtypes = ("float32", "int8")

    def __init__(self):
        super().__init__(CpuOptions())


def layer(pages=PAGES, rotation=None, format="packed_heads"):
    return PagedLayer("layer", format, (pages,), rotation)


def table(width, offset=0, **how):
    return layer(rotation=Rotation(torch.zeros(100, width, **how), True, offset))


BYTES = PAGES.to(torch.int8)


PAIR = [layer()] * 2
REFUSED: list[tuple[Any, int, str, type[Exception], str]] = [
    ([layer(), table(8, -1)], BLOCK, "float32", LayoutMismatch, "cos_sin of shape"),
    ([layer(), table(7)], BLOCK, "float32", LayoutMismatch, "cos_sin of shape"),
    ([layer(), table(14)], BLOCK, "float32", LayoutMismatch, "cos_sin of shape"),
    ([layer(), table(8, dtype=torch.float64)], BLOCK, "float32", Unsupported, "must be float32"),
    ([layer(), table(8, device="meta")], BLOCK, "float32", Unsupported, "lie on cpu, meta"),
    ([layer(), layer(GAPS)], BLOCK, "float32", Unsupported, "the last one must be 1"),
    ([layer(format="packed_tiles")] * 2, BLOCK, "float32", Unsupported, "'packed_tiles'.*supports packed_heads"),
    ([layer(BYTES), layer(BYTES, Rotary().build())], BLOCK, "int8", Unsupported, "cannot be rotated"),
    (PAIR, BLOCK, "bfloat16", Unsupported, "of bfloat16; it supports float32, int8: leave out --kv-cache"),
    (PAIR, 0, "float32", LayoutMismatch, "block_size 0"),
]


@pytest.mark.parametrize("layers, block_size, dtype, error, words", REFUSED)
def test_pages_that_no_device_takes(layers, block_size, dtype, error, words):
    with pytest.raises(error, match=words):
        FewPages().attach(layers, block_size, replace(LAYOUT, dtype=dtype))


def test_groups_lie_on_one_device_and_copies_stay_within_them():
    """And what is no transfer names the device."""

    class Forgetful(FewPages):
        def _save(self, *_):
            return None

    device, segments, block_ids = Forgetful(), [Segment(Span(0, 5), 0, 0, 0)], np.arange(5)
    device.attach(PAIR, BLOCK, LAYOUT)
    with pytest.raises(Unsupported, match="lie on meta and on cpu"):
        device.attach([layer(PAGES.to("meta"))] * 2, BLOCK, LAYOUT)
    device.pin(np.zeros(LAYOUT.shard_bytes, np.uint8))
    with pytest.raises(InvalidInput, match="skip_prefix_n_tokens"):
        device.load(segments, block_ids, -1)
    tables: list[Any] = [np.zeros(5), np.zeros((5, 1), np.int64)]
    for table in tables:
        with pytest.raises(InvalidInput, match="flat array of integers"):
            device.save(segments, table)
    with pytest.raises(BrokenContract, match="Forgetful should return a Transfer for a copy, got None"):
        device.save(segments, block_ids)


def test_layers_that_share_a_table_share_its_contiguous_copy():
    layers = [layer(rotation=Rotation(wide := torch.ones(100, 20)[:, :8], True)), layer(rotation=Rotation(wide, False))]
    first, second = (one.rotation.cos_sin for one in read_pages(layers, BLOCK, LAYOUT).layers)
    assert first is second and first.is_contiguous()


def test_a_long_prompt_takes_few_calls_of_the_interpreter_a_gib():
    """32,768 tokens of Llama 3.1 8B; a batch takes a copy of its table, a copy for each slice, and a launch."""
    options = pytest.importorskip("blendhub_cuda", reason="pip install 'blendhub[cuda]'").CudaOptions()
    layout = KVLayout(layers=32, kv_heads=8, key_dim=128, value_dim=128, dtype="bfloat16", chunk_tokens=256)
    planner = batches.BatchPlanner(layout, 16, int(options.staging_mib * 2**20) // 4)
    starts, gib = range(0, 32_768, 256), 128 * layout.shard_bytes / 2**30
    chunks = [Segment(Span(at, at + 256), at // 256 * layout.shard_bytes, 0, at + 1000) for at in starts]
    with Profile(builtins=False) as profile:
        made = list(planner.batches(chunks, np.arange(2048)))
    # The interpreter that plans is that which submits other transfers and the engine's steps.
    assert sum(entry.callcount for entry in profile.getstats()) / len(chunks) <= 40
    assert len(made) / gib <= 32
    assert sum(2 + len(batch.slices) for batch in made) / gib <= 96
    pieces = [Segment(Span(at, at + 5), at * layout.shard_bytes, 3, at + 1000 * (at >= 40)) for at in range(0, 80, 10)]
    made = list(planner.batches(pieces, np.arange(5)))
    assert [(batch.n_tokens, batch.moved) for batch in made] == [(20, 0), (20, 1)]
    assert not any(batch.table.strides[0] % 64 for batch in made), "operators read its rows with wide accesses"
