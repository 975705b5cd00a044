"""Devices with one fault each, and the test of the device suite that must catch it."""

import inspect
import itertools
from typing import Any

import numpy as np
import pytest

from blendhub.contracts import Device
from blendhub.testing import AttentionTests, DeviceSuite
from blendhub.testing.attention_reference import ReferenceAttention
from blendhub.testing.device_reference import rotated
from blendhub.testing.devices.base import harnesses
from tests import faulty_devices as faulty
from tests.faulty_devices import (
    ChecksNothing,
    Faulty,
    SlowDevice,
    as_if_contiguous,
    attaching,
    attending,
    beginning,
    device,
    ignoring,
    loading,
    replace,
    rotating,
    saving,
)
from tests.suite_runs import all_tests

pytestmark = pytest.mark.slow


ATTEND = ReferenceAttention.attend

FAULTS: dict[str, list[Faulty]] = {
    "test_chunks_and_blocks_of_any_size": [
        loading(lambda self, segments, n: (segments, 0)),
        loading(lambda self, segments, n: (segments, n // self.groups[0].block_size * self.groups[0].block_size)),
        saving(lambda self, segments: []),
    ],
    "test_segments_anywhere": [
        loading(faulty.whole_chunks),
        loading(lambda self, segments, n: ([replace(one, row=0) for one in segments], n)),
        saving(lambda self, segments: [replace(one, row=0) for one in segments]),
        loading(lambda self, segments, n: ([one for one in segments if one.span >= segments[0].span], n)),
    ],
    "test_source_start_plays_no_part_in_saving": [
        saving(lambda self, segments: [replace(one, span=faulty.source_of(one)) for one in segments]),
    ],
    "test_blocks_that_no_segment_needs_may_be_unknown": [device(load=faulty.checks_the_whole_table)],
    "test_the_callers_block_table_may_change_after_the_call": [device(load=faulty.copies_only_in_wait)],
    "test_groups_of_layers_have_pages_and_block_tables_of_their_own": [faulty.KnowsTheLastGroupOnly],
    "test_a_large_transfer_is_whole": [
        loading(lambda self, segments, n: ([one for one in segments if one.span.end <= 1000], n)),
    ],
    "test_every_bit_is_copied": [device(load=faulty.decodes_all_pages), attaching(faulty.copied)],
    "test_pages_of_all_layers_may_share_one_allocation": [attaching(faulty.copied)],
    "test_heads_and_widths": [device(reference=faulty.ThreeHeads)],
    "test_numbers_of_8_bits_may_be_kept_as_bytes": [attaching(faulty.refuse_bytes)],
    "test_values_too_large_for_8_bits_saturate": [rotating(faulty.overflowing)],
    "test_moved_keys_are_rotated": [
        rotating(lambda self, key, rotation, old, new: rotated(key, rotation, new, old)),
    ],
    "test_every_rotation": [
        rotating(lambda self, key, rotation, old, new: rotated(key, replace(rotation, offset=0), old, new)),
        rotating(lambda self, key, rotation, old, new: rotated(key, replace(rotation, neox=True), old, new)),
        rotating(faulty.scaled_twice),
        rotating(faulty.rounded_twice),
    ],
    "test_each_layer_has_its_own_rotation": [device(_attach=faulty.attach_alike)],
    "test_each_token_is_rotated_from_its_own_position": [
        loading(lambda self, segments, n: ([faulty.from_the_prefix(one, n) for one in segments], n)),
        loading(lambda self, segments, n: ([faulty.moved_like(segments[0], one) for one in segments], n)),
    ],
    "test_positions_up_to_the_last_row_of_the_table": [
        rotating(lambda self, key, rotation, old, new: rotated(key, rotation, min(old, 2**17 - 1), new)),
    ],
    "test_a_table_may_be_part_of_a_wider_one": [attaching(faulty.with_table_as_if_contiguous)],
    "test_any_transfers": [loading(lambda self, segments, n: (segments, 0))],
    "test_invalid_segments_change_nothing": [device(load=faulty.copies_before_it_checks), ChecksNothing],
    "test_nothing_is_copied_without_group_pages_or_arena": [ChecksNothing],
    "test_an_arena_is_a_flat_array_of_bytes": [ChecksNothing],
    "test_pages_that_are_not_what_the_layout_says": [ChecksNothing],
    "test_unsupported_formats_and_dtypes_are_refused": [ChecksNothing],
    "test_several_transfers_may_be_pending": [device(load=faulty.copies_the_last_only)],
    "test_an_empty_transfer_ends": [device(load=faulty.refuses_nothing)],
    "test_transfers_follow_the_engine_s_earlier_work": [
        faulty.SavesEachSegmentOnce,
        faulty.LoadsBeforeWhatTheEngineWroteLast,
    ],
    "test_a_step_writes_other_pages_than_its_loads_and_its_saves_see_them": [
        faulty.LoadsIntoThePagesBeforeTheStep,
        faulty.SavesThePagesBeforeTheStep,
    ],
    "test_calls_inside_and_outside_of_inference_mode": [
        device(pin=faulty.pins_a_tensor_in_the_caller_s_mode, save=faulty.saves_through_that_tensor),
    ],
    "test_another_arena_replaces_the_first": [device(_pin=faulty.keeps_the_first_arena)],
    "test_an_arena_is_used_while_it_is_being_reserved": [
        device(_pin=faulty.touches_all_of_the_arena),
        faulty.WaitsUntilTheArenaIsReserved,
        faulty.AsksForProgressForEver,
    ],
    "test_close_waits_for_pending_transfers": [device(load=faulty.copies_only_in_wait)],
    "test_close_releases_arena_and_pages": [device(_close=lambda self: None)],
    "test_block_tokens_is_a_number_of_tokens": [device(block_tokens=0)],
    "test_attention_over_several_groups_is_refused": [device(attention=faulty.attends_to_the_first_group)],
    "test_each_token_attends_to_the_keys_of_its_prompt_up_to_its_position": [
        beginning(lambda tokens: {"positions": np.full_like(tokens.positions, tokens.positions.max())}),
        beginning(lambda tokens: {"positions": np.sort(tokens.positions)}),
        beginning(lambda tokens: {"blocks": np.repeat(tokens.blocks[:1], len(tokens.blocks), 0)}),
        beginning(lambda tokens: {"blocks": np.roll(tokens.blocks, 1, axis=1)}),
        attending(attend=lambda self, layer, queries, output: ATTEND(self, layer, as_if_contiguous(queries), output)),
        attending(attend=lambda self, layer, queries, output: ATTEND(self, layer, queries, as_if_contiguous(output))),
    ],
    "test_each_layer_has_its_rules": [
        device(attends=faulty.SharesKeysInTurn),
        attending(attend=lambda self, layer, queries, output: ATTEND(self, 0, queries, output)),
        *(ignoring(**rule) for rule in ({"scale": 0.2}, {"window": None}, {"chunk": None}, {"sinks": None})),
        ignoring(soft_cap=0.0),
    ],
    "test_pages_of_every_format": [ignoring(latent=0)],
    "test_keys_and_values_of_8_bits_have_scales": [ignoring(key_scale=1.0), ignoring(value_scale=1.0)],
}


class Suite(DeviceSuite, AttentionTests):
    tested: Any = SlowDevice

    def create(self) -> Device:
        made: Device = self.tested()
        return made


def test_a_faulty_device_proves_each_test() -> None:
    assert set(FAULTS) == all_tests(Suite)


@pytest.mark.usefixtures("without_shrinking")
@pytest.mark.parametrize("test, number", [(test, n) for test, faults in FAULTS.items() for n in range(len(faults))])
def test_suite_catches(test: str, number: int) -> None:
    tested = FAULTS[test][number]
    assert not _passes(type("FaultySuite", (Suite,), {"tested": tested})(), test)


@pytest.mark.usefixtures("without_shrinking")
@pytest.mark.parametrize("test", sorted(all_tests(Suite)))
def test_suite_passes_a_correct_device(test: str) -> None:
    assert _passes(Suite(), test)


def _passes(suite: Suite, name: str) -> bool:
    """Run one test of a suite, for all values of its parameters, as pytest would."""
    test = getattr(suite, name)
    asked = inspect.signature(test).parameters
    values = {mark.args[0]: mark.args[1] for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize"}
    values |= {"format": suite.formats} if "format" in asked else {}
    for chosen in itertools.product(*values.values()):
        with harnesses(suite.create, suite.torch_type) as make:
            fixtures = {"make_harness": lambda: make, "device": suite.create, "harness": lambda: make(suite.setup())}
            arguments = {fixture: value() for fixture, value in fixtures.items() if fixture in asked}
            try:
                test(**arguments, **dict(zip(values, chosen, strict=True)))
            except (Exception, pytest.fail.Exception):
                return False
    return True


class LimitedDevice(SlowDevice):
    """A correct device of few formats and dtypes: the suite may be limited to what a device supports."""

    formats = ("packed_transposed", "split")
    dtypes = ("int8", "bfloat16", "float8_e4m3")


class TestLimitedDevice(DeviceSuite):
    formats = LimitedDevice.formats
    dtypes = LimitedDevice.dtypes

    def create(self) -> Device:
        return LimitedDevice()
