"""What ``Device`` checks for every device, beyond what the suite requires of any: each error names what is wrong."""

import msgspec
import numpy as np
import pytest

pytest.importorskip("torch", reason="pages are tensors: pip install torch")

import torch

from blendhub.contracts import PagedLayer, Rotation, Segment
from blendhub.core.errors import BrokenContract, InvalidInput, LayoutMismatch, Unsupported
from blendhub.core.spans import Span
from blendhub.devices import read_pages
from blendhub.testing.devices.device_harness import DeviceSetup, Rotary
from tests.faulty_devices import SlowDevice

SETUP = DeviceSetup()
PAGES = torch.zeros(SETUP.n_blocks, SETUP.kv_heads, SETUP.block_size, SETUP.key_dim + SETUP.value_dim)
GAPS = torch.zeros(SETUP.n_blocks, 3, 24, 8).transpose(2, 3)


def layer(pages=PAGES, rotation=None, format="packed_heads"):
    return PagedLayer("layer", format, (pages,), rotation)


def table(width, offset=0, **how):
    return layer(rotation=Rotation(torch.zeros(100, width, **how), True, offset))


@pytest.mark.parametrize(
    "changed, error, words",
    [
        *((table(width, offset), LayoutMismatch, "cos_sin of shape") for width, offset in ((14, 0), (8, 5), (8, -1))),
        *((table(width), LayoutMismatch, "cos_sin of shape") for width in (7, 0)),
        (table(8, dtype=torch.float64), Unsupported, "must be float32"),
        (table(8, device="meta"), Unsupported, "lie on cpu, meta"),
        (layer(PAGES.to("meta")), Unsupported, "lie on cpu, meta"),
        (layer(GAPS), Unsupported, "the last one must be 1"),
        (layer(format="packed_transposed"), Unsupported, r"'packed_transposed'.*it supports packed_heads, split"),
    ],
)
def test_pages_that_no_device_takes(changed, error, words):
    device = SlowDevice()
    device.formats = ("packed_heads", "split")
    with pytest.raises(error, match=words):
        device.attach([layer(), changed], SETUP.block_size, SETUP.layout())


def test_int8_keys_cannot_be_rotated():
    pages = PAGES.to(torch.int8)
    layers, layout = (
        [layer(pages), layer(pages, Rotary().build())],
        msgspec.structs.replace(SETUP.layout(), dtype="int8"),
    )
    with pytest.raises(Unsupported, match="cannot be rotated"):
        SlowDevice().attach(layers, SETUP.block_size, layout)


def test_a_dtype_that_the_device_does_not_support_is_named_with_a_way_out():
    device = SlowDevice()
    device.dtypes = ("bfloat16",)
    with pytest.raises(Unsupported, match="does not support KV of float32; it supports bfloat16: leave out --kv-cache"):
        device.attach([layer(), layer()], SETUP.block_size, SETUP.layout())


def test_a_block_has_tokens():
    with pytest.raises(LayoutMismatch, match="block_size 0"):
        SlowDevice().attach([layer(), layer()], 0, SETUP.layout())


def attached():
    device = SlowDevice()
    device.attach([layer(), layer()], SETUP.block_size, SETUP.layout())
    device.pin(np.zeros(SETUP.layout().shard_bytes, np.uint8))
    return device


SEGMENTS, BLOCKS = [Segment(Span(0, 5), 0, 0, 0)], np.arange(5)


def test_groups_lie_on_one_device():
    with pytest.raises(Unsupported, match="lie on meta and on cpu"):
        attached().attach([layer(PAGES.to("meta"))] * 2, SETUP.block_size, SETUP.layout())


def test_a_negative_prefix_is_refused():
    with pytest.raises(InvalidInput, match="skip_prefix_n_tokens"):
        attached().load(SEGMENTS, BLOCKS, -1)


@pytest.mark.parametrize("block_ids", [np.zeros(5), np.zeros((5, 1), np.int64)], ids=["floats", "2d"])
def test_a_block_table_is_a_flat_array_of_integers(block_ids):
    with pytest.raises(InvalidInput, match="flat array of integers"):
        attached().save(SEGMENTS, block_ids)


def test_a_copy_that_is_no_transfer_names_the_device():
    class Forgetful(SlowDevice):
        def _save(self, *_):
            return None

    device = attached()
    device.__class__ = Forgetful
    with pytest.raises(BrokenContract, match="Forgetful should return a Transfer for a copy, got None"):
        device.save(SEGMENTS, BLOCKS)


def test_layers_that_share_a_table_share_its_contiguous_copy():
    layers = [layer(rotation=Rotation(wide := torch.ones(100, 20)[:, :8], True)), layer(rotation=Rotation(wide, False))]
    first, second = (one.rotation.cos_sin for one in read_pages(layers, SETUP.block_size, SETUP.layout()).layers)
    assert first is second and first.is_contiguous()
