"""What all parts of the device suite share: how to make a device, and a world in which it copies."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Self, TypeAlias

import pytest

from blendhub.contracts import Device, PageFormat
from blendhub.host import PluginHost
from blendhub.layout import ITEM_SIZES
from blendhub.testing.devices.world import Setup, World

MakeWorld: TypeAlias = Callable[[Setup], World]

NUMBERS = tuple(dtype for dtype in ITEM_SIZES if dtype != "int8")
"""The types whose keys can be turned."""


class DeviceTests(ABC):
    """Base of the parts of the suite. A subclass's ``create`` makes the device under test."""

    torch_type: ClassVar[str] = Device.torch_type
    """Where the engine's pages lie, as torch calls it."""

    formats: ClassVar[tuple[PageFormat, ...]] = Device.formats
    """The page formats that the device serves; the first is used where the format plays no part."""

    dtypes: ClassVar[tuple[str, ...]] = Device.dtypes
    """The types that the device serves; the first of those that can be turned is used where the type plays no part."""

    @abstractmethod
    def create(self) -> Device:
        """A new device, not attached to anything."""

    @classmethod
    def of_installed(cls, host: PluginHost, name: str, options: Mapping[str, Any]) -> type[Self]:
        """The suite of an installed device; raises if it cannot be created with these options."""

        def create(suite: object) -> Any:
            return host.create("device", name, options)

        device = create(None)
        device.close()
        served = {name: getattr(device, name) for name in ("torch_type", "formats", "dtypes")}
        return type("TestInstalledDevice", (cls,), {"create": create, **served})

    @pytest.fixture
    def device(self) -> Iterator[Device]:
        device = self.create()
        yield device
        device.close()

    @pytest.fixture
    def make_world(self) -> Iterator[MakeWorld]:
        """Makes worlds, each with a device of its own, that are closed with the test."""
        made: list[World] = []

        def make(setup: Setup) -> World:
            self.skip_unless_served(setup.format, setup.dtype)
            made.append(World(self.create(), self.torch_type, setup))
            return made[-1]

        yield make
        for world in made:
            world.device.close()

    @pytest.fixture
    def world(self, make_world: MakeWorld) -> World:
        """One for tests in which neither format nor type matters. Its keys do not turn."""
        return make_world(self.setup())

    def setup(self, **fields: Any) -> Setup:
        """A setup that the device serves, but for these fields."""
        dtype = next(dtype for dtype in self.dtypes if dtype in NUMBERS)
        return Setup(**{"format": self.formats[0], "dtype": dtype, **fields})

    def skip_unless_served(self, format: PageFormat, dtype: str) -> None:
        for what, served in ((format, self.formats), (dtype, self.dtypes)):
            if what not in served:
                pytest.skip(f"this device does not serve {what!r}")
