"""The conformance suite on the CPU device, as a stranger's: through the host."""

import pytest
from blendhub_cpu import CpuOptions
from blendhub_cpu.device import CpuDevice
from msgspec.structs import replace

from blendhub import PluginHost
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
