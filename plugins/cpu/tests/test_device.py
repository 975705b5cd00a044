"""The conformance suite on the CPU device, as a stranger's: through the host; and that it copies blocks at once."""

import numpy as np
import pytest
from blendhub_cpu import CpuOptions
from blendhub_cpu.device import CpuDevice
from msgspec.structs import replace

from blendhub import PluginHost
from blendhub.core.errors import Unsupported
from blendhub.testing.devices import DeviceSuite
from blendhub.testing.devices.device_harness import DeviceHarness, DeviceSetup, Rotary


class TestCpu(DeviceSuite.of_installed(PluginHost.discover(), "cpu", {})):  # type: ignore[misc]
    """The suite that ``blendhub conformance`` runs."""


@pytest.mark.parametrize("format", ["packed_heads", "packed_tiles"])
@pytest.mark.parametrize("table", [[7, 8, 9, 10, 11], [3, 4, 9, 10, 2], [9, 1, 7, 3, 5, 11, 0]])
def test_blocks_that_follow_each_other_and_those_that_do_not(table, format):
    setup = DeviceSetup(format=format, rotations=(Rotary(), None), chunk_tokens=112)
    for start, end in ((0, 40), (8, 32), (3, 39), (17, 19), (0, setup.block_size * len(table))):
        harness = DeviceHarness(CpuDevice(CpuOptions()), "cpu", setup)
        harness.block_ids = np.array(table)
        harness.load([harness.segment(start, end, source=500)])
        harness.overwrite_pages()
        harness.save([harness.segment(start, end)])


def test_pages_on_another_device_are_refused():
    harness = DeviceHarness(CpuDevice(CpuOptions()), "cpu", DeviceSetup())
    layers = [replace(layer, tensors=tuple(t.to("meta") for t in layer.tensors)) for layer in harness.layers]
    with pytest.raises(Unsupported, match=r"lie on meta.*choose another device"):
        CpuDevice(CpuOptions()).attach(layers, harness.setup.block_size, harness.layout)
