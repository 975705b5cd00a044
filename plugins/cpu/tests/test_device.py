"""The conformance suite on the CPU device, as a stranger's: through the host. And the page tables for its arena."""

import mmap
import os
import re
import time
from pathlib import Path

import numpy as np
import pytest
from blendhub_cpu import CpuOptions, arena_pages
from blendhub_cpu.arena_pages import ArenaPages
from blendhub_cpu.device import CpuDevice
from msgspec.structs import replace

from blendhub import PluginHost
from blendhub.contracts import ArenaProgress
from blendhub.core.errors import Unsupported
from blendhub.testing.devices import DeviceSuite
from blendhub.testing.devices.device_harness import DeviceHarness, DeviceSetup


class TestCpu(DeviceSuite.of_installed(PluginHost.discover(), "cpu", {})):  # type: ignore[misc]
    """The suite that ``blendhub conformance`` runs."""


def test_block_tokens_is_an_option_and_pages_on_another_device_are_refused():
    harness = DeviceHarness(CpuDevice(CpuOptions(block_tokens=5)), "cpu", DeviceSetup())
    assert harness.device.block_tokens == 5
    layers = [replace(layer, tensors=tuple(t.to("meta") for t in layer.tensors)) for layer in harness.layers]
    with pytest.raises(Unsupported, match=r"lie on meta.*choose another device"):
        CpuDevice(CpuOptions()).attach(layers, harness.setup.block_size, harness.layout)


@pytest.mark.parametrize("protection", [mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_WRITE])
def test_the_page_tables_are_filled_as_far_as_the_arena_is_reserved(monkeypatch, protection):
    monkeypatch.setattr(arena_pages, "STEP", mmap.PAGESIZE)
    size = 1024 * mmap.PAGESIZE
    name = f"arena-{protection}"
    fd = os.memfd_create(name)
    os.truncate(fd, size)
    arena = np.frombuffer(mmap.mmap(fd, size, prot=protection), np.uint8)

    def filled() -> int:
        maps = Path("/proc/self/smaps").read_text()
        return 1024 * int(re.findall(rf"memfd:{name} .*?\nRss: +(\d+) kB", maps, re.S)[0])

    reserved, deadline = size // 2, time.monotonic() + 10
    pages = ArenaPages(arena, lambda: ArenaProgress(reserved, size))
    for end in (reserved, size):
        reserved = end
        while filled() < end:
            assert time.monotonic() < deadline
        time.sleep(0.01)
        assert filled() == end
    ArenaPages(arena, lambda: ArenaProgress(0, size)).stop()
    pages.stop()
    os.close(fd)
