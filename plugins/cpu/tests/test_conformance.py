"""The conformance suite of devices, run on the CPU device."""

from blendhub_cpu import CpuOptions
from blendhub_cpu.device import CpuDevice

from blendhub.contracts import Device
from blendhub.testing.devices import DeviceSuite


class TestCpu(DeviceSuite):
    def create(self) -> Device:
        return CpuDevice(CpuOptions())
