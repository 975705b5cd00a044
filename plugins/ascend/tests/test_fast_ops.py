"""Which operators write and read pages, and that a wrong use of them fails."""

import msgspec
import pytest
import torch
from blendhub_ascend import fast_ops, schemas
from blendhub_ascend.chips import chip_of
from blendhub_ascend.pages import read_pages
from npu_stand_ins import A2, A3, A5, NEEDS_STAND_INS, UNKNOWN, device_on, device_on_npu_runtime

from blendhub.core.errors import Unsupported
from blendhub.testing.devices.deferred import DeferredRuntime
from blendhub.testing.devices.device_harness import DeviceHarness, Rotary, Setup

pytestmark = NEEDS_STAND_INS

SETUP = Setup(
    format="split", dtype="bfloat16", kv_heads=2, key_dim=16, value_dim=16, block_size=16, rotations=(Rotary(), None)
)
RESHAPE, SCATTER, GATHER = "atb::_npu_reshape_and_cache", "npu::npu_scatter_pa_kv_cache", "npu::npu_gather_pa_kv_cache"


def pages_of(**changed):
    setup = msgspec.structs.replace(SETUP, **changed)
    harness = DeviceHarness(device_on(DeferredRuntime()), "cpu", setup)
    harness.device.close()
    return read_pages(harness.layers, setup.block_size, harness.layout)


def choose(soc_version=A2, allowed=True, **changed):
    return fast_ops.choose(chip_of(soc_version), pages_of(**changed), allowed)


@pytest.mark.parametrize(
    "soc_version, scatter, gather",
    [
        (A2, fast_ops.reshape_and_cache, None),
        (A3, fast_ops.reshape_and_cache, None),
        (A5, fast_ops.scatter_pa_kv_cache, fast_ops.gather_pa_kv_cache),
        (UNKNOWN, None, None),
    ],
)
def test_each_npu_is_served_with_the_operators_that_vllm_ascend_uses_on_it(soc_version, scatter, gather):
    chosen = choose(soc_version)
    assert (chosen.scatter, chosen.gather) == (scatter, gather)
    assert len(chosen.reasons) == 2


@pytest.mark.parametrize(
    "changed, reason",
    [
        ({"dtype": "float32"}, "operators take no torch.float32"),
        ({"key_dim": 12, "value_dim": 12}, "a head of 12 items is not whole 32 bytes"),
        ({"value_dim": 32}, "keys and values differ"),
        ({"strided": True}, "the pages are not contiguous"),
    ],
    ids=str,
)
def test_pages_that_operators_do_not_take_are_served_with_torch(changed, reason):
    chosen = choose(A5, **changed)
    assert (chosen.scatter, chosen.gather) == (None, None)
    assert all(reason in one for one in chosen.reasons)


def test_the_option_switches_all_operators_off():
    chosen = choose(A5, allowed=False)
    assert chosen == (
        None,
        None,
        tuple(f"pages are {what} with torch: fast_ops is false" for what in ("written", "read")),
    )


def test_an_operator_with_another_schema_is_not_called(monkeypatch):
    longer = schemas.SCHEMAS[RESHAPE].replace("Tensor slot_indices", "Tensor slot_indices, int width=0")
    monkeypatch.setitem(schemas.SCHEMAS, RESHAPE, longer)
    chosen = choose(A2)
    assert chosen.scatter is None and "has another schema here" in chosen.reasons[0]


def test_an_operator_that_torch_npu_lacks_is_not_called(monkeypatch):
    monkeypatch.setattr(schemas.torch, "ops", object())
    chosen = choose(A2)
    assert chosen.scatter is None and f"{RESHAPE} is not loaded here" in chosen.reasons[0]


@pytest.mark.parametrize("what", ["scatter", "gather"])
def test_an_operator_that_moves_other_bytes_in_the_trial_is_not_used(monkeypatch, what):
    operator = {"scatter": SCATTER, "gather": GATHER}[what]
    right = fast_ops.OPERATORS[operator]

    def one_slot_late(keys, values, key_pages, value_pages, *numbers):
        right(keys, values, key_pages, value_pages, *numbers)
        (key_pages if what == "scatter" else keys).view(torch.int16).flatten(0, 1)[0] += 1

    monkeypatch.setitem(fast_ops.OPERATORS, operator, one_slot_late)
    chosen = choose(A5)
    assert getattr(chosen, what) is None
    assert any(f"{operator} moved other bytes than torch in a trial" in one for one in chosen.reasons)


def test_an_operator_that_fails_in_the_trial_is_not_used(monkeypatch):
    def fail(*_):
        raise RuntimeError("error 561002")

    monkeypatch.setitem(fast_ops.OPERATORS, RESHAPE, fail)
    assert f"{RESHAPE} failed in a trial: error 561002" in choose(A2).reasons[0]


def test_a_save_from_the_middle_of_a_block_does_not_trust_seq_offset(monkeypatch):
    """The operator rounds an offset down to whole blocks, so such a save reads with torch."""
    calls = []
    right = fast_ops.gather_pa_kv_cache
    monkeypatch.setitem(fast_ops.OPERATORS, GATHER, lambda *a: (calls.append(1), right(*a))[1])
    harness = DeviceHarness(device_on_npu_runtime(A5), "cpu", SETUP)
    calls.clear()
    harness.save([harness.segment(16, 40)])
    n_aligned = len(calls)
    harness.overwrite_pages()
    harness.save([harness.segment(19, 40)])
    assert n_aligned == 2 and len(calls) == n_aligned  # one call for each layer


def test_a_310p_is_refused():
    with pytest.raises(Unsupported, match=r"310P, whose KV is in a private format.*kv-transfer-config"):
        chip_of(203)


def test_the_recorded_schemas_are_those_of_the_versions_in_the_guide():
    assert schemas.VERSIONS == {"torch_npu": "2.10.0.post4", "vllm_ascend": "0.23.0"}
    for operator, schema in schemas.SCHEMAS.items():
        assert schema.startswith(operator)
        torch._C.parse_schema(schema)
