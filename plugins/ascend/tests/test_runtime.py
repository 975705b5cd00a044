"""The runtime for NPUs: order, copies in batches, and the registration of the arena."""

import ctypes
import logging
import mmap
import time

import numpy as np
import pytest
import torch
from blendhub_ascend import operators
from blendhub_ascend import runtime as runtime_module

from blendhub.testing.devices.device_harness import DeviceHarness, DeviceSetup
from blendhub.testing.devices.streams import wait_until_pinned
from plugins.ascend.tests.npu_stand_ins import (
    NEEDS_STAND_INS,
    HostRuntime,
    aligned,
    device_on_npu_runtime,
    torch_npu_of,
)

pytestmark = NEEDS_STAND_INS

CPU = torch.device("cpu")


def runtime_of(batch_copies=True):
    runtime = HostRuntime(CPU, torch_npu_of(), batch_copies)
    runtime.enter()
    return runtime


def test_kernels_run_in_the_stream_and_after_its_copies():
    runtime = runtime_of()
    stream, seen = runtime.create_stream(), []
    runtime.copy(stream, [(aligned(64), aligned(64))])
    assert len(stream.events) == 1, "kernels of the stream do not wait for the copy"
    runtime.launch(stream, lambda: seen.append(runtime._accelerator.current_stream(CPU)))
    assert seen == [stream] and runtime._accelerator.current_stream(CPU) is not stream


@pytest.mark.parametrize(
    "n_pairs, offset, is_allowed, is_loaded", [(5, 0, 1, 1), (1, 0, 1, 1), (5, 3, 1, 1), (5, 0, 0, 1), (5, 0, 1, 0)]
)
def test_many_copies_to_aligned_addresses_are_submitted_at_once(monkeypatch, n_pairs, offset, is_allowed, is_loaded):
    """Where that is allowed, and vllm-ascend has loaded its operator."""
    if not is_loaded:
        monkeypatch.setitem(operators.SCHEMAS, operators.COPY_MANY, f"{operators.COPY_MANY}(Tensor x) -> ()")
    calls, copy_at_once = [], runtime_module._copy_at_once
    monkeypatch.setattr(runtime_module, "_copy_at_once", lambda pairs: (calls.append(len(pairs)), copy_at_once(pairs)))
    source, target = aligned(n_pairs * 256).random_(), aligned(n_pairs * 256).zero_()
    parts = [slice(at * 256 + offset, at * 256 + offset + 100) for at in range(n_pairs)]
    runtime = runtime_of(bool(is_allowed))
    runtime.copy(runtime.create_stream(), [(target[part], source[part]) for part in parts])
    assert calls == ([5] if (n_pairs, offset, is_allowed, is_loaded) == (5, 0, 1, 1) else [])
    assert all(torch.equal(target[part], source[part]) for part in parts)


class Acl:
    """CANN's library, as strict as it is about pages."""

    def __init__(self, status=0):
        self.status, self.registered = status, {}

    def aclrtHostRegister(self, address, nbytes, kind, device_address):
        assert kind == 0 and isinstance(address, ctypes.c_void_p) and isinstance(nbytes, ctypes.c_uint64)
        if address.value % mmap.PAGESIZE or nbytes.value % mmap.PAGESIZE:
            return 507899
        if not self.status:
            self.registered[address.value] = nbytes.value
        return self.status

    def aclrtHostUnregister(self, address):
        del self.registered[address.value]
        return 0


@pytest.fixture
def acl(monkeypatch):
    library = Acl()
    monkeypatch.setattr(runtime_module, "load_acl", lambda: library)
    return library


@pytest.fixture
def harness():
    harness = DeviceHarness(device_on_npu_runtime(), "cpu", DeviceSetup(format="split", dtype="bfloat16"))
    wait_until_pinned(harness)
    yield harness
    harness.device.close()


def test_a_device_copies_straight_between_a_registered_arena_and_staging(acl, harness):
    """Whole pages are registered, wherever the arena begins."""
    arena, first, end = harness.arena, min(acl.registered), sum(max(acl.registered.items()))
    assert first <= arena.ctypes.data and arena.ctypes.data + arena.size <= end
    harness.save(harness.chunks(3, 60))
    harness.overwrite_pages()
    harness.load(harness.chunks(3, 60), 7)
    for queue in (harness.device._attached.loads, harness.device._attached.saves):
        assert all(stream._bounce_buffer is None for stream in queue._streams)
    harness.device.close()
    assert not acl.registered


@pytest.mark.parametrize(
    "library, reason",
    [
        (Acl(507899), "aclrtHostRegister returned error 507899"),
        (object(), "aclrtHostRegister failed: 'object' object has no attribute 'aclrtHostRegister'"),
    ],
    ids=["refused", "an old release"],
)
def test_an_arena_that_cannot_be_registered_is_logged_with_the_reason(monkeypatch, caplog, request, library, reason):
    monkeypatch.setattr(runtime_module, "load_acl", lambda: library)
    with caplog.at_level(logging.WARNING):
        harness = request.getfixturevalue("harness")
    (line,) = [record.getMessage() for record in caplog.records]
    assert reason in line and "docs/ascend.md" in line
    harness.load(harness.chunks(3, 60))


@pytest.mark.parametrize("submitted, is_used", [(0.001, True), (0.009, False)])
def test_an_arena_whose_copies_block_is_not_used_directly(acl, monkeypatch, submitted, is_used):
    """ACL may take the memory, and yet copy it in the thread that asks for the copy."""
    clock = iter((0.0, submitted, 0.010) * 2)
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    error = runtime_of().register(np.zeros(5 * 2**20, np.uint8))
    assert error is None if is_used else "hold up the thread" in error
    assert bool(acl.registered) == is_used
