"""torch_npu as far as the runtime of the device uses it, without an NPU: pages lie on the CPU, and streams do not wait.

It is strict where torch_npu is: a thread must have set its device, an event must be recorded before anything waits for
it, and there are no names that the wheel of torch_npu lacks. Strict operators stand in for those of torch_npu.
"""

import threading
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import blendhub_ascend
import pytest
import torch
from blendhub_ascend.device import AscendDevice
from blendhub_ascend.runtime import AscendRuntime

from blendhub.framework.hookspecs import available_everywhere
from blendhub.testing.devices.base import DeviceTests
from blendhub.testing.devices.deferred import DeferredRuntime
from plugins.ascend.tests import strict_ops
from tests.device_host import host_of_device

HAS_NPU = False
if find_spec("torch_npu"):
    import torch_npu

    HAS_NPU = torch_npu.npu.is_available()
if not HAS_NPU:
    strict_ops.define()

NEEDS_STAND_INS = pytest.mark.skipif(HAS_NPU, reason="the operators are torch_npu's own here, and take no CPU tensors")

A2, A3, A5, UNKNOWN = 220, 250, 260, 999
"""SoC versions as ``torch_npu.npu.get_soc_version`` returns them."""
WIDE: dict[str, Any] = {"dtype": "bfloat16", "key_dim": 16, "value_dim": 16}
"""Pages of widths that the operators of torch_npu take."""


class StandInNpu:
    """``torch_npu.npu``."""

    def __init__(self, soc_version=A2, available=True):
        self.get_soc_version, self.is_available = (lambda: soc_version), (lambda: available)
        self.Event = partial(StandInEvent, self)
        self._threads = threading.local()
        self._default = StandInStream()

    def _check_thread(self):
        assert getattr(self._threads, "place", None) is not None, "error 107002: this thread has no context"

    def set_device(self, place):
        self._threads.place = place

    def Stream(self, place):
        self._check_thread()
        return StandInStream()

    def current_stream(self, place):
        self._check_thread()
        return getattr(self._threads, "stream", self._default)

    @contextmanager
    def stream(self, stream):
        before = self.current_stream(None)
        self._threads.stream = stream
        yield
        self._threads.stream = before


class StandInEvent:
    def __init__(self, npu):
        self._npu = npu
        self.recorded = False

    def record(self, stream):
        self._npu._check_thread()
        self.recorded = True

    def query(self):
        self._npu._check_thread()
        assert self.recorded, "an event that was never recorded seems to be reached"
        return True

    synchronize = query


class StandInStream:
    def __init__(self):
        self.events = []

    def wait_event(self, event):
        event.query()
        self.events.append(event)


def torch_npu_of(soc_version=A2, available=True):
    return SimpleNamespace(npu=StandInNpu(soc_version, available))


class HostRuntime(AscendRuntime):
    """The NPU's runtime, whose memory is the host's. Direct copies want addresses of multiples of 64."""

    def allocate(self, nbytes):
        return aligned(nbytes)

    allocate_pinned = allocate


def aligned(nbytes):
    memory = torch.empty(nbytes + 512, dtype=torch.uint8)
    first = -memory.data_ptr() % 512
    return memory[first : first + nbytes]


def npu_runtime(soc_version=A2):
    """The runtime for NPUs, with operators in place of those of this NPU."""
    torch_npu = torch_npu_of(soc_version)
    return lambda place, chosen: HostRuntime(place, torch_npu, chosen.fast_ops)


def host_on(runtime=lambda place, chosen: DeferredRuntime(), soc_version=A2):
    """A host of the device, without the hardware that its own factory and its probe look for.

    Unless the runtime is given, it defers all work.
    """

    def factory(chosen):
        return AscendDevice(chosen, lambda place: runtime(place, chosen), lambda: soc_version)

    return host_of_device(blendhub_ascend, factory=factory, probe=available_everywhere)


def device_on_npu_runtime(soc_version=A2, **options):
    return host_on(npu_runtime(soc_version), soc_version).create("device", "npu", options)


def installed(suite, host, **options):
    """The suite that ``blendhub conformance`` runs, or parts of it, with pages on the CPU."""
    made = suite.of_installed(host, "npu", options)
    made.torch_type = "cpu"
    return made


class Wide:
    """Pages of widths that the operators of torch_npu take, unless a test wants others."""

    fields = WIDE

    def setup(self, **fields):
        return DeviceTests.setup(self, **{**WIDE, **fields})  # type: ignore[arg-type]
