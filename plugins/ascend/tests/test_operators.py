"""Which operators write and read pages, and that a wrong use of them fails."""

import json
import logging
from pathlib import Path

import pytest
import torch
from blendhub_ascend import operators
from msgspec.structs import replace

from blendhub.testing.devices.device_harness import DeviceHarness, DeviceSetup, Rotary
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
            device = npu.device_on(soc_version=soc_version, fast_ops=fast_ops)
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
