"""Base class and fixtures of the device suite."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any, ClassVar, Self, TypeAlias

import pytest

from blendhub.contracts import Device, PageFormat
from blendhub.framework.host import PluginHost
from blendhub.testing.devices.device_harness import DeviceHarness, DeviceSetup

MakeHarness: TypeAlias = Callable[[DeviceSetup], DeviceHarness]


@contextmanager
def harnesses(create: Callable[[], Device], torch_type: str) -> Iterator[MakeHarness]:
    """Makes harnesses, each with a new device; all devices are closed at the end."""
    made: list[DeviceHarness] = []

    def make(setup: DeviceSetup) -> DeviceHarness:
        made.append(DeviceHarness(create(), torch_type, setup))
        return made[-1]

    yield make
    for harness in made:
        harness.device.close()


class DeviceTests(ABC):
    """Base of the parts of the suite. A subclass's ``create`` makes the device under test."""

    contract: ClassVar[type] = Device

    torch_type: ClassVar[str] = Device.torch_type
    """The torch device type of the engine's pages."""

    formats: ClassVar[tuple[PageFormat, ...]] = Device.formats
    """The page formats that the device supports; the first is used where the format does not matter."""

    dtypes: ClassVar[tuple[str, ...]] = Device.dtypes
    """The dtypes that the device supports; the first rotatable one is used where it does not matter."""

    n_random_transfers: ClassVar[int] = 200
    """How many random transfers are tried; fewer suit a device whose kernels run in an interpreter."""

    @abstractmethod
    def create(self) -> Device:
        """A new device, not attached to anything."""

    @classmethod
    def of_installed(cls, host: PluginHost, name: str, options: Mapping[str, Any]) -> type[Self]:
        """The suite of an installed device; raises if it cannot be created with these options."""

        def create(suite: object) -> Any:
            return host.create("device", name, options)

        with closing(create(None)) as device:
            fields = {field: getattr(device, field) for field in ("torch_type", "formats", "dtypes")}
            return type("TestInstalledDevice", cls.parts_for(device), {"create": create, **fields})

    @classmethod
    def parts_for(cls, device: Device) -> tuple[type, ...]:
        """The parts of the suite that a device is tested by."""
        return (cls,)

    @property
    def rotatable_dtypes(self) -> list[str]:
        """The dtypes of the device whose keys can be rotated."""
        return [dtype for dtype in self.dtypes if dtype != "int8"]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "format" in metafunc.fixturenames:
            metafunc.parametrize("format", self.formats)

    @pytest.fixture
    def device(self) -> Iterator[Device]:
        device = self.create()
        yield device
        device.close()

    @pytest.fixture
    def make_harness(self) -> Iterator[MakeHarness]:
        with harnesses(self.create, self.torch_type) as make:
            yield make

    @pytest.fixture
    def harness(self, make_harness: MakeHarness) -> DeviceHarness:
        """A harness without rotations, for tests that do not depend on format or dtype."""
        return make_harness(self.setup())

    def setup(self, **fields: Any) -> DeviceSetup:
        """A setup that the device supports, with these fields changed."""
        return DeviceSetup(**{"format": self.formats[0], "dtype": self.rotatable_dtypes[0], **fields})
