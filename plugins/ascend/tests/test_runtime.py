"""The runtime for NPUs: threads, order, copies in batches, and the registration of the arena."""

import ctypes
import logging
import mmap
import re
import threading

import numpy as np
import pytest
import torch
from blendhub_ascend import runtime as runtime_module
from blendhub_ascend import schemas
from blendhub_ascend.host_memory import HostMemory
from npu_stand_ins import NEEDS_STAND_INS, HostRuntime, StandInNpu, StandInTorchNpu, aligned, device_on_npu_runtime

from blendhub.testing.devices.device_harness import DeviceHarness, Setup

pytestmark = NEEDS_STAND_INS

CPU = torch.device("cpu")


def runtime_of(batch_copies=True):
    runtime = HostRuntime(CPU, StandInTorchNpu(), batch_copies)
    runtime.enter()
    return runtime


def test_a_thread_sets_its_device_once(monkeypatch):
    places = []
    monkeypatch.setattr(StandInNpu, "set_device", lambda npu, place: places.append((threading.get_ident(), place)))
    runtime = HostRuntime(CPU, StandInTorchNpu(), batch_copies=True)
    for number in range(3):
        thread = threading.Thread(target=lambda: [runtime.enter() for _ in range(2)])
        thread.start()
        thread.join()
        assert len(places) == number + 1 and places[-1] == (thread.ident, CPU)


def test_kernels_run_in_the_stream_and_after_its_copies():
    runtime = runtime_of()
    stream, seen = runtime.create_stream(), []
    runtime.copy(stream, aligned(64), aligned(64))
    assert len(stream.events) == 1, "kernels of the stream do not wait for the copy"
    runtime.launch(stream, lambda: seen.append(runtime._npu.current_stream(CPU)), {})
    assert seen == [stream] and runtime._npu.current_stream(CPU) is not stream


def pairs_of(n_pairs, *, offset=0):
    source, target = aligned(n_pairs * 256), aligned(n_pairs * 256).zero_()
    source.copy_(torch.randint(0, 256, source.shape).to(torch.uint8))
    parts = [slice(at * 256 + offset, at * 256 + offset + 100) for at in range(n_pairs)]
    return [(target[part], source[part]) for part in parts]


@pytest.fixture
def batches(monkeypatch):
    """The number of copies of each call of vllm-ascend's operator."""
    calls, copy_at_once = [], runtime_module._copy_at_once

    def count(pairs):
        calls.append(len(pairs))
        copy_at_once(pairs)

    monkeypatch.setattr(runtime_module, "_copy_at_once", count)
    return calls


@pytest.mark.parametrize(
    "n_pairs, offset, batch_copies, expected",
    [(5, 0, True, [5]), (1, 0, True, []), (5, 3, True, []), (5, 0, False, [])],
    ids=["many", "one", "at odd addresses", "not allowed"],
)
def test_many_copies_are_submitted_at_once(batches, n_pairs, offset, batch_copies, expected):
    runtime, pairs = runtime_of(batch_copies), pairs_of(n_pairs, offset=offset)
    runtime.copy_many(runtime.create_stream(), pairs)
    assert batches == expected
    assert all(torch.equal(target, source) for target, source in pairs)


def test_without_vllm_ascend_copies_are_submitted_one_by_one(batches, monkeypatch):
    monkeypatch.setitem(schemas.SCHEMAS, "_C_ascend::swap_blocks_batch", "_C_ascend::swap_blocks_batch(Tensor x) -> ()")
    runtime, pairs = runtime_of(), pairs_of(5)
    runtime.copy_many(runtime.create_stream(), pairs)
    assert batches == [] and all(torch.equal(target, source) for target, source in pairs)


class Acl:
    """CANN's library, as strict as it is about pages."""

    def __init__(self, status=0):
        self.status = status
        self.registered = {}

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
    monkeypatch.setattr(HostMemory, "_acl", lambda self: library)
    return library


def test_an_arena_of_any_address_is_registered_by_whole_pages(acl):
    arena = np.zeros(3 * mmap.PAGESIZE, np.uint8)[100:9000]
    runtime = runtime_of()
    assert runtime.register(arena) is None
    ((first, nbytes),) = acl.registered.items()
    assert first <= arena.ctypes.data and first + nbytes >= arena.ctypes.data + arena.size
    runtime.unregister(arena)
    assert not acl.registered


def test_a_device_copies_straight_between_a_registered_arena_and_staging(acl):
    harness = DeviceHarness(device_on_npu_runtime(), "cpu", Setup(format="split", dtype="bfloat16"))
    harness.device.wait_until_pinned()
    assert acl.registered
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
        (lambda name: Acl(507899), "aclrtHostRegister returned error 507899"),
        (lambda name: object(), "aclrtHostRegister failed: 'object' object has no attribute 'aclrtHostRegister'"),
        (ctypes.CDLL, "aclrtHostRegister failed: libascendcl.so"),
    ],
    ids=["refused", "an old release", "no CANN"],
)
def test_the_reason_of_a_failed_registration_is_named(library, reason):
    assert HostMemory(StandInNpu(), library).register(mmap.PAGESIZE, 10).startswith(reason)


def test_torch_npu_registers_where_it_can():
    calls = []

    class Npu(StandInNpu):
        def npurt(self):
            return self

        def npuHostRegister(self, address, nbytes, flags):
            calls.append((address, nbytes, flags))
            return 0

        def npuHostUnregister(self, address):
            calls.append(address)

    memory = HostMemory(Npu(), ctypes.CDLL)
    assert memory.register(mmap.PAGESIZE + 5, 10) is None and memory.unregister(mmap.PAGESIZE + 5) is None
    assert calls == [(mmap.PAGESIZE, mmap.PAGESIZE, 0x10000002), mmap.PAGESIZE]


@pytest.mark.parametrize(
    "seconds, expected", [((0.0, 0.001, 0.010), None), ((0.0, 0.009, 0.010), "hold up the thread")]
)
def test_an_arena_whose_copies_block_is_not_used_directly(acl, monkeypatch, seconds, expected):
    """ACL may take the memory, and yet copy it in the thread that asks for the copy."""
    clock = iter(seconds * 2)
    monkeypatch.setattr(runtime_module.time, "perf_counter", lambda: next(clock))
    arena = np.zeros(5 * 2**20, np.uint8)
    error = runtime_of().register(arena)
    assert (error is None) if expected is None else (expected in error)
    assert bool(acl.registered) == (expected is None)


def test_an_arena_that_cannot_be_registered_is_logged_once_with_the_way_out(caplog):
    with caplog.at_level(logging.WARNING):
        harness = DeviceHarness(device_on_npu_runtime(), "cpu", Setup(format="split"))
        harness.device.wait_until_pinned()
    (line,) = [record.getMessage() for record in caplog.records]
    assert "libascendcl.so" in line and "docs/ascend.md" in line
    harness.load(harness.chunks(3, 60))
    harness.device.close()


def test_the_stand_in_has_no_names_that_torch_npu_lacks():
    names = {name for name in vars(StandInNpu) if re.match(r"[A-Za-z]", name)} - {"check_thread"}
    assert names <= set(schemas.NAMES)
