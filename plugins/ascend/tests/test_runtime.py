"""What is done with torch_npu: which operators write and read pages, order, copies in batches, and the registration of
the arena. A wrong use of operators fails."""

import ctypes
import json
import logging
import mmap
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from blendhub_ascend import operators
from blendhub_ascend import runtime as runtime_module
from msgspec.structs import replace

from blendhub.testing.devices.device_harness import DeviceHarness, DeviceSetup, Rotary
from blendhub.testing.devices.streams import wait_until_pinned
from plugins.ascend.tests import npu_stand_ins as npu

pytestmark = npu.NEEDS_STAND_INS

SETUP = DeviceSetup(format="split", kv_heads=2, block_size=16, rotations=(Rotary(), None), **npu.WIDE)
RESHAPE, SCATTER, GATHER = "atb::_npu_reshape_and_cache", "npu::npu_scatter_pa_kv_cache", "npu::npu_gather_pa_kv_cache"


@pytest.fixture
def chosen(caplog):
    """The ways in which a device writes and reads these pages, as the log says."""

    def attach(soc_version=npu.A2, fast_ops=True, **changed):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            device = npu.host_on(soc_version=soc_version).create("device", "npu", {"fast_ops": fast_ops})
            DeviceHarness(device, "cpu", replace(SETUP, **changed)).device.close()
        said = [record.getMessage() for record in caplog.records if "pages are" in record.getMessage()]
        return [line.partition(" with ")[2] for line in said]

    return attach


@pytest.mark.parametrize(
    "soc_version, changed, written, read",
    [
        (npu.A2, {}, RESHAPE, "torch: no operator is known"),
        (npu.A3, {}, RESHAPE, "torch: no operator is known"),
        (npu.A5, {}, SCATTER, GATHER),
        (npu.UNKNOWN, {}, *["torch: no operator is known"] * 2),
        (npu.A5, {"dtype": "float32"}, *["torch: operators take no torch.float32"] * 2),
        (npu.A5, {"key_dim": 12, "value_dim": 12}, *["torch: a head of 12 items is not whole 32 bytes"] * 2),
        (npu.A5, {"value_dim": 32}, *["torch: keys and values differ"] * 2),
        (npu.A5, {"strided": True}, *["torch: the pages are not contiguous"] * 2),
        (npu.A5, {"fast_ops": False}, *["torch: fast_ops is false"] * 2),
    ],
)
def test_pages_that_fit_are_served_with_what_vllm_ascend_uses_on_the_npu(chosen, soc_version, changed, written, read):
    ways = chosen(soc_version, **changed)
    assert ways[0].startswith(written) and ways[1].startswith(read)


@pytest.mark.parametrize("operator", [SCATTER, GATHER])
def test_an_operator_that_is_another_one_or_fails_in_the_trial_is_not_used(chosen, monkeypatch, operator):
    right, at = operators.OPERATORS[operator], [SCATTER, GATHER].index(operator)

    def one_slot_late(keys, values, key_pages, value_pages, *numbers):
        right(keys, values, key_pages, value_pages, *numbers)
        (keys if at else key_pages).view(torch.int16).flatten(0, 1)[0] += 1

    def fail(*_):
        raise RuntimeError("error 561002")

    monkeypatch.setitem(operators.OPERATORS, operator, one_slot_late)
    assert chosen(npu.A5)[at] == f"torch: {operator} moved other bytes than torch in a trial"
    monkeypatch.setitem(operators.OPERATORS, operator, fail)
    assert chosen(npu.A5)[at] == f"torch: {operator} failed in a trial: error 561002"
    monkeypatch.setitem(operators.SCHEMAS, operator, f"{operator}(Tensor x) -> ()")
    assert f"torch: {operator} has another schema here" in chosen(npu.A5)[at]
    monkeypatch.setattr(torch, "ops", object())
    assert operators.problem_with(operator) == f"{operator} is not loaded here"


def test_a_save_from_the_middle_of_a_block_does_not_trust_seq_offset(monkeypatch):
    """The operator rounds an offset down to whole blocks, so such a save reads with torch."""
    calls, right = [], operators.OPERATORS[GATHER]
    monkeypatch.setitem(operators.OPERATORS, GATHER, lambda *a: (calls.append(1), right(*a))[1])
    harness = DeviceHarness(npu.device_on_npu_runtime(npu.A5), "cpu", SETUP)
    calls.clear()
    harness.save([harness.segment(16, 40)])
    assert len(calls) == 2  # one call for each layer
    harness.overwrite_pages()
    harness.save([harness.segment(19, 40)])
    assert len(calls) == 2


def test_the_record_is_of_the_versions_in_the_guide_and_the_stand_in_has_no_other_names():
    record = json.loads(Path(operators.__file__).with_name("schemas.json").read_text())
    assert record["versions"] == {"torch_npu": "2.10.0.post4", "vllm_ascend": "0.23.0"}
    assert {name for name in dir(npu.StandInNpu()) if not name.startswith("_")} <= set(record["names"])


CPU = torch.device("cpu")


def runtime_of(batch_copies=True):
    runtime = npu.HostRuntime(CPU, npu.torch_npu_of(), batch_copies)
    runtime.enter()
    return runtime


def test_kernels_run_in_the_stream_and_after_its_copies():
    runtime = runtime_of()
    stream, seen = runtime.create_stream(), []
    runtime.copy(stream, [(npu.aligned(64), npu.aligned(64))])
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
    source, target = npu.aligned(n_pairs * 256).random_(), npu.aligned(n_pairs * 256).zero_()
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
    harness = DeviceHarness(npu.device_on_npu_runtime(), "cpu", DeviceSetup(format="split", dtype="bfloat16"))
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
