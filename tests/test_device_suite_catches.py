"""Devices with one fault each, and the test of the device suite that must catch it."""

import inspect
import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from blendhub.contracts import (
    Device,
    PagedLayer,
)
from blendhub.core.errors import Unsupported
from blendhub.core.layout import KVLayout
from blendhub.testing.device_reference import (
    ReferenceDevice,
)
from blendhub.testing.devices import DeviceSuite
from blendhub.testing.devices.device_harness import DeviceHarness, DeviceSetup
from tests import faulty_attention, faulty_copies, faulty_steps
from tests.faulty_attention import AttendingDevice
from tests.suite_runs import all_tests

pytestmark = pytest.mark.slow

FAULTS = [*faulty_copies.FAULTS, *faulty_steps.FAULTS, *faulty_attention.FAULTS]


def test_a_faulty_device_proves_each_test() -> None:
    assert {test for _, test in FAULTS} == all_tests(DeviceSuite)


@pytest.mark.usefixtures("without_shrinking")
@pytest.mark.parametrize("faulty, test", FAULTS, ids=lambda value: getattr(value, "__name__", value))
def test_suite_catches(faulty: type[ReferenceDevice], test: str) -> None:
    class Suite(DeviceSuite):
        def create(self) -> Device:
            return faulty()

    assert not _passes(Suite(), test), f"{test} lets {faulty.__name__} pass"


@pytest.mark.usefixtures("without_shrinking")
@pytest.mark.parametrize("test", sorted({test for _, test in FAULTS}))
def test_suite_passes_a_correct_device(test: str) -> None:
    class Suite(DeviceSuite):
        def create(self) -> Device:
            return AttendingDevice()

    assert _passes(Suite(), test)


def _passes(suite: DeviceSuite, name: str) -> bool:
    """Run one test of a suite, for all values of its parameters, as pytest would."""
    test = getattr(suite, name)
    wanted = inspect.signature(test).parameters
    values = {mark.args[0]: mark.args[1] for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize"}
    values |= {name: served for name, served in suite.parameters().items() if name in wanted}
    for chosen in itertools.product(*values.values()):
        given = dict(zip(values, chosen, strict=True))
        try:
            test(**given, **_fixtures(suite, wanted))
        except pytest.skip.Exception:
            continue
        except (Exception, pytest.fail.Exception):
            return False
    return True


def _fixtures(suite: DeviceSuite, wanted: Any) -> dict[str, Any]:
    def make_harness(setup: DeviceSetup) -> DeviceHarness:
        return DeviceHarness(suite.create(), suite.torch_type, setup)

    made = {
        "device": suite.create,
        "make_harness": lambda: make_harness,
        "harness": lambda: make_harness(suite.setup()),
    }
    return {name: make() for name, make in made.items() if name in wanted}


class LimitedDevice(ReferenceDevice):
    """A correct device of few formats and dtypes: the suite may be limited to what a device supports."""

    formats: Any = ("packed_transposed", "split")
    dtypes: Any = ("int8", "bfloat16", "float8_e4m3")

    def attach(self, layers: Sequence[PagedLayer], block_size: int, layout: KVLayout) -> None:
        if layout.dtype not in self.dtypes or any(layer.format not in self.formats for layer in layers):
            raise Unsupported(f"only {self.formats} of {self.dtypes} are supported")
        super().attach(layers, block_size, layout)


class TestLimitedDevice(DeviceSuite):
    formats = LimitedDevice.formats
    dtypes = LimitedDevice.dtypes

    def create(self) -> Device:
        return LimitedDevice()
