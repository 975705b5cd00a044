"""Synchronisation of the Ascend device, tested with a runtime that defers all work until something waits for it."""

import pytest
from blendhub_ascend.device import AscendDevice
from npu_stand_ins import A2, device_on

from blendhub.testing.devices.device_harness import DeviceHarness, Rotary, Setup
from blendhub.testing.devices.streams import DeferredRuntime, StreamSuite, run_pending_transfers, wait_until_pinned

SMALL_STAGING = 1.01
"""MiB of staging: one layer of a chunk in each stream, so that a chunk passes through each stream several times."""


class TestTorchAlone(StreamSuite):
    formats = AscendDevice.formats

    def create(self, runtime):
        return device_on(runtime, fast_ops=False, staging_mib=SMALL_STAGING)


WIDE = {"dtype": "bfloat16", "key_dim": 16, "value_dim": 16}
"""Pages that the operators of torch_npu take."""

pytestmark = pytest.mark.slow


class TestA2(StreamSuite):
    """With the operators of one NPU: which ones they are changes nothing of the order."""

    formats = AscendDevice.formats
    fields = WIDE

    def create(self, runtime):
        return device_on(runtime, A2, staging_mib=SMALL_STAGING)


def harness_on(runtime, staging_mib=SMALL_STAGING, soc_version=A2):
    sizes = {"chunk_tokens": 40, "n_blocks": 40, "n_shards": 8}
    setup = Setup(format="split", rotations=(Rotary(),) * 3, **WIDE, **sizes)
    harness = DeviceHarness(device_on(runtime, soc_version, staging_mib=staging_mib), "cpu", setup)
    wait_until_pinned(harness)
    return harness


@pytest.mark.parametrize("error", [None, "not registered"], ids=["registered", "bounce buffers"])
def test_staging_that_holds_several_chunks(error):
    harness = harness_on(DeferredRuntime(error), staging_mib=32)
    run_pending_transfers(harness)
    harness.device.close()


class Recording(DeferredRuntime):
    """Notes what is submitted to which stream, and every wait of the host."""

    def __init__(self):
        super().__init__()
        self.submitted, self.waited = [], 0

    def copy(self, stream, target, source):
        self.submitted.append((self._streams.index(stream), "copy"))
        super().copy(stream, target, source)

    def launch(self, stream, kernel, arguments):
        self.submitted.append((self._streams.index(stream), "move"))
        super().launch(stream, kernel, arguments)

    def synchronize(self, event):
        self.waited += 1
        super().synchronize(event)


def test_three_streams_take_turns_and_nothing_waits_between_layers():
    """While a batch is copied, the one before is rotated and the one before that is written; the host waits at the
    end alone, once for each stream, however many layers there are."""
    runtime = Recording()
    harness = harness_on(runtime)
    runtime.submitted.clear()
    runtime.waited = 0
    transfer = harness.start_load(harness.chunks(0, 160, source=50))
    transfer._submitted.result()
    assert runtime.waited == 0
    moves = [stream for stream, what in runtime.submitted if what == "move"]
    assert len(moves) == 12 and moves == [0, 1, 2] * 4
    transfer.wait()
    assert runtime.waited == 3
    harness.check()
    harness.device.close()
