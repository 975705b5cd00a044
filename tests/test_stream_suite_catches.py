"""Devices with streams that have one fault each, and the test that must see it: of StreamSuite, and of RaceSuite."""

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from blendhub_cpu import CpuOptions
from blendhub_cpu.device import CpuDevice

from blendhub.contracts import Transfer
from blendhub.devices import StreamDevice
from blendhub.testing.devices.deferred import DeferredRuntime
from blendhub.testing.devices.racing import RaceSuite
from blendhub.testing.devices.streams import StreamSuite
from tests.copying_device import CopyingDevice
from tests.suite_runs import proofs

pytestmark = pytest.mark.slow


def on_runtime(**calls: Callable[..., Any]) -> Callable[..., StreamDevice]:
    """A device whose calls of the runtime come to these, which get the honest call first."""

    def device(suite: object, runtime: DeferredRuntime) -> StreamDevice:
        for name, call in calls.items():
            setattr(runtime, name, partial(call, getattr(runtime, name)))
        return CopyingDevice(runtime)

    return device


def transferring(change: Callable[[Any], None]) -> type[CopyingDevice]:
    """A device with changed transfers."""

    def changed(transfer: Transfer) -> Transfer:
        change(transfer)
        return transfer

    methods = {
        "_load": lambda self, *given: changed(StreamDevice._load(self, *given)),
        "_save": lambda self, *given: changed(StreamDevice._save(self, *given)),
    }
    return type("Faulty", (CopyingDevice,), methods)


UNPINNED: dict[str, Any] = {"register": lambda register, memory: "no more locked memory"}
ONE_BUFFER: dict[int, torch.Tensor] = {}
STREAM_FAULTS: dict[str, list[Any]] = {
    "test_transfers_follow_the_engine_s_earlier_work_alone": [on_runtime(wait_event=lambda wait, *events: None)],
    "test_in_a_step_saves_follow_its_work_and_loads_only_that_before": [
        type("Faulty", (CopyingDevice,), {"begin_step": lambda self: None}),
    ],
    "test_the_engine_s_stream_waits_for_reads_of_pages_and_its_thread_does_not": [
        transferring(lambda transfer: setattr(transfer, "release_pages", transfer.wait)),
        transferring(lambda transfer: setattr(transfer, "release_pages", lambda: None)),
    ],
    "test_blocks_that_a_load_has_read_may_change": [
        transferring(lambda transfer: setattr(transfer, "release_pages", lambda: None)),
    ],
    "test_pending_transfers_do_not_overwrite_each_other_s_staging": [
        on_runtime(**UNPINNED, allocate_pinned=lambda allocate, size: ONE_BUFFER.setdefault(size, allocate(size))),
    ],
}


class TestStreams(StreamSuite):
    """Without a fault there is nothing to catch."""

    fields = {"rotations": (None,) * 3}  # noqa: RUF012
    create: Any = CopyingDevice


class Streams(TestStreams):
    @pytest.fixture
    def runtime(self) -> DeferredRuntime:
        return DeferredRuntime()


# Races, on the CPU in place of an accelerator.


class Later(Transfer):
    def __init__(self, copy: Callable[[], object]) -> None:
        self._thread = threading.Thread(target=copy)
        self._thread.start()

    def done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        self._thread.join()


class OnCpu(CpuDevice):
    def __init__(self) -> None:
        super().__init__(CpuOptions())


class WritesAllPagesForAMoment(OnCpu):
    pages: Any

    def _attach(self, layers: Any, *sizes: Any) -> None:
        super()._attach(layers, *sizes)
        self.pages = layers[0].tensors[0]

    def _load(self, *arguments: Any) -> Transfer:
        def copy() -> None:
            before = self.pages.clone()
            self.pages.zero_()
            time.sleep(0.1)
            self.pages.copy_(before)
            CpuDevice._load(self, *arguments)

        return Later(copy)


RACE_FAULTS: dict[str, list[Any]] = {
    "test_pages_that_others_read_never_change": [WritesAllPagesForAMoment],
}


class TestRaces(RaceSuite):
    torch_type, format, block = "cpu", "packed_heads", 16
    layers, n_tokens = 1, 512
    create: Any = OnCpu


globals().update(proofs(Streams, STREAM_FAULTS))
globals().update({f"{name}OfRaces": made for name, made in proofs(TestRaces, RACE_FAULTS).items()})
