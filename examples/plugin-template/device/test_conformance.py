"""The suite that ships with BlendHub, run on this device."""

from plain_device.device import PlainDevice

from blendhub.testing import DeviceSuite


class TestPlainDevice(DeviceSuite):
    formats = PlainDevice.formats

    def create(self) -> PlainDevice:
        return PlainDevice()
