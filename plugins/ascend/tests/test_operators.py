"""Which operators write and read pages, and that a wrong use of them fails."""

import logging

import pytest
import torch
from blendhub_ascend import operators
from blendhub_ascend.operators import chip_of, problem_with
from msgspec.structs import replace

from blendhub.core.errors import Unsupported
from blendhub.testing.devices.device_harness import DeviceHarness, DeviceSetup, Rotary
from plugins.ascend.tests.npu_stand_ins import (
    A2,
    A3,
    A5,
    NEEDS_STAND_INS,
    UNKNOWN,
    WIDE,
    device_on,
    device_on_npu_runtime,
)

pytestmark = NEEDS_STAND_INS

SETUP = DeviceSetup(format="split", kv_heads=2, block_size=16, rotations=(Rotary(), None), **WIDE)
RESHAPE, SCATTER, GATHER = "atb::_npu_reshape_and_cache", "npu::npu_scatter_pa_kv_cache", "npu::npu_gather_pa_kv_cache"


@pytest.fixture
def chosen(caplog):
    """The ways in which a device writes and reads these pages, as the log says."""

    def attach(soc_version=A2, fast_ops=True, **changed):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            device = device_on(soc_version=soc_version, fast_ops=fast_ops)
            DeviceHarness(device, "cpu", replace(SETUP, **changed)).device.close()
        said = [record.getMessage() for record in caplog.records if "pages are" in record.getMessage()]
        return [line.partition(" with ")[2] for line in said]

    return attach


@pytest.mark.parametrize(
    "soc_version, written, read",
    [(A2, RESHAPE, "torch: "), (A3, RESHAPE, "torch: "), (A5, SCATTER, GATHER), (UNKNOWN, "torch: ", "torch: ")],
)
def test_each_npu_is_served_with_the_operators_that_vllm_ascend_uses_on_it(chosen, soc_version, written, read):
    found = chosen(soc_version)
    assert found[0].startswith(written) and found[1].startswith(read)


@pytest.mark.parametrize(
    "changed, reason",
    [
        ({"dtype": "float32"}, "operators take no torch.float32"),
        ({"key_dim": 12, "value_dim": 12}, "a head of 12 items is not whole 32 bytes"),
        ({"value_dim": 32}, "keys and values differ"),
        ({"strided": True}, "the pages are not contiguous"),
        ({"fast_ops": False}, "fast_ops is false"),
    ],
    ids=str,
)
def test_pages_that_operators_do_not_take_are_served_with_torch(chosen, changed, reason):
    assert all(line.startswith(f"torch: {reason}") for line in chosen(A5, **changed))


def test_an_operator_with_another_schema_or_none_is_not_called(chosen, monkeypatch):
    longer = operators.SCHEMAS[RESHAPE].replace("Tensor slot_indices", "Tensor slot_indices, int width=0")
    with monkeypatch.context() as patch:
        patch.setitem(operators.SCHEMAS, RESHAPE, longer)
        assert f"torch: {RESHAPE} has another schema here" in chosen()[0]
    monkeypatch.setattr(torch, "ops", object())
    assert problem_with(RESHAPE) == f"{RESHAPE} is not loaded here"


@pytest.mark.parametrize("operator", [SCATTER, GATHER])
def test_an_operator_that_moves_other_bytes_in_the_trial_or_fails_is_not_used(chosen, monkeypatch, operator):
    right, at = operators.OPERATORS[operator], [SCATTER, GATHER].index(operator)

    def one_slot_late(keys, values, key_pages, value_pages, *numbers):
        right(keys, values, key_pages, value_pages, *numbers)
        (keys if at else key_pages).view(torch.int16).flatten(0, 1)[0] += 1

    def fail(*_):
        raise RuntimeError("error 561002")

    monkeypatch.setitem(operators.OPERATORS, operator, one_slot_late)
    assert chosen(A5)[at] == f"torch: {operator} moved other bytes than torch in a trial"
    monkeypatch.setitem(operators.OPERATORS, operator, fail)
    assert chosen(A5)[at] == f"torch: {operator} failed in a trial: error 561002"


def test_a_save_from_the_middle_of_a_block_does_not_trust_seq_offset(monkeypatch):
    """The operator rounds an offset down to whole blocks, so such a save reads with torch."""
    calls, right = [], operators.OPERATORS[GATHER]
    monkeypatch.setitem(operators.OPERATORS, GATHER, lambda *a: (calls.append(1), right(*a))[1])
    harness = DeviceHarness(device_on_npu_runtime(A5), "cpu", SETUP)
    calls.clear()
    harness.save([harness.segment(16, 40)])
    assert len(calls) == 2  # one call for each layer
    harness.overwrite_pages()
    harness.save([harness.segment(19, 40)])
    assert len(calls) == 2


def test_a_310p_is_refused():
    with pytest.raises(Unsupported, match=r"310P, whose KV is in a private format.*kv-transfer-config"):
        chip_of(203)


def test_the_recorded_schemas_are_those_of_the_versions_in_the_guide():
    assert operators.VERSIONS == {"torch_npu": "2.10.0.post4", "vllm_ascend": "0.23.0"}
    for operator, schema in operators.SCHEMAS.items():
        assert schema.startswith(operator)
        torch._C.parse_schema(schema)
