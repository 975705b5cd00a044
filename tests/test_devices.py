"""The checks that devices share, beyond what the suite requires of any device."""

import time
from typing import Any

import msgspec
import numpy as np
import pytest

from blendhub.contracts import PagedLayer, Rotation, Segment
from blendhub.core.errors import InvalidInput, LayoutMismatch, Unsupported
from blendhub.core.spans import Span
from blendhub.testing.devices.device_harness import DeviceSetup, Rotary

pytest.importorskip("torch", reason="pages are tensors: pip install torch")

import torch

from blendhub import devices

SETUP = DeviceSetup()


def layer(**changes):
    """One of the setup's two layers, with these fields changed."""
    pages = torch.zeros(SETUP.n_blocks, SETUP.kv_heads, SETUP.block_size, SETUP.key_dim + SETUP.value_dim)
    return msgspec.structs.replace(PagedLayer("layer", SETUP.format, (pages,)), **changes)


def check(changed, setup=SETUP, formats=("packed_heads", "split")):
    return devices.read_pages([layer(), changed], setup.block_size, setup.layout(), formats)


def test_layers_that_share_a_table_share_its_contiguous_copy():
    table = torch.ones(100, 20)[:, :8]
    pages = check(layer(rotation=Rotation(table, True)))
    assert pages.place == torch.device("cpu") and pages.n_positions == 100
    assert pages.layers[1].rotation.cos_sin.is_contiguous()


def test_int8_keys_cannot_be_rotated():
    as_bytes = layer().tensors[0].to(torch.int8)
    whole = [layer(tensors=(as_bytes,)), layer(tensors=(as_bytes,), rotation=Rotary().build())]
    layout = msgspec.structs.replace(SETUP, dtype="int8").layout()
    with pytest.raises(Unsupported, match="cannot be rotated"):
        devices.read_pages(whole, SETUP.block_size, layout, ["packed_heads"])


@pytest.mark.parametrize("width, offset", [(14, 0), (8, 5), (8, -1), (7, 0), (0, 0)])
def test_the_rotated_part_lies_within_the_key(width, offset):
    with pytest.raises(LayoutMismatch, match="cos_sin of shape"):
        check(layer(rotation=Rotation(torch.zeros(100, width), True, offset)))


def test_cos_sin_is_float32():
    with pytest.raises(Unsupported, match="must be float32"):
        check(layer(rotation=Rotation(torch.zeros(100, 8, dtype=torch.float64), True)))


def test_the_last_axis_is_contiguous():
    pages = torch.zeros(SETUP.n_blocks, 3, 24, 8).transpose(2, 3)
    with pytest.raises(Unsupported, match="the last one must be 1"):
        check(layer(tensors=(pages,)))


class CountedRuntime(devices.Runtime):
    """Registers at the slowest recorded rate, half a second a GiB, and notes each call: its bytes, begin and end."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), None)
        self.calls = []

    def set_device(self) -> None:
        pass

    def register(self, memory):
        begin = time.monotonic()
        time.sleep(memory.size / 2**31)
        self.calls.append((memory.size, begin, time.monotonic()))

    def unregister(self, memory) -> None:
        pass


def test_pinning_holds_up_no_step_for_more_than_5_ms():
    """A step's calls of the accelerator wait for at most one part, and most of the time there is none to wait for."""
    runtime = CountedRuntime()
    devices.HostArena(np.zeros(2**26, np.uint8), runtime).pin()
    sizes, begins, ends = zip(*runtime.calls, strict=True)
    assert sum(sizes) == 2**26 and max(sizes) / 2**31 <= 0.005
    for took, pause in zip(np.subtract(ends, begins), np.subtract(begins[1:], ends[:-1]), strict=False):
        assert pause >= min(8 * took, 0.09)


def test_the_error_about_a_format_lists_the_supported_ones():
    with pytest.raises(Unsupported, match=r"'packed_transposed'.*it supports packed_heads, split"):
        check(layer(format="packed_transposed"))


@pytest.mark.parametrize("what", ["pages", "cos_sin"])
def test_everything_is_on_one_device(what):
    away: dict[str, Any] = {
        "pages": {"tensors": tuple(t.to("meta") for t in layer().tensors)},
        "cos_sin": {"rotation": Rotation(torch.zeros(100, 8, device="meta"), True)},
    }
    with pytest.raises(Unsupported, match="lie on cpu, meta"):
        check(layer(**away[what]))


def test_a_block_has_tokens():
    with pytest.raises(LayoutMismatch, match="block_size 0"):
        check(layer(), msgspec.structs.replace(SETUP, block_size=0))


def bounds():
    pages = devices.Pages((), SETUP.n_blocks, None, torch.device("cpu"))
    return devices.Bounds(SETUP.layout(), SETUP.block_size, pages)


def test_a_negative_prefix_is_refused():
    with pytest.raises(InvalidInput, match="skip_prefix_n_tokens"):
        bounds().check_load([Segment(Span(0, 5), 0, 0, 0)], -1)


@pytest.mark.parametrize("block_ids", [np.zeros(5), np.zeros((5, 1), np.int64)], ids=["floats", "2d"])
def test_a_block_table_is_a_flat_array_of_integers(block_ids):
    with pytest.raises(InvalidInput, match="flat array of integers"):
        bounds().check([Segment(Span(0, 5), 0, 0, 0)], block_ids, SETUP.layout().shard_bytes)
