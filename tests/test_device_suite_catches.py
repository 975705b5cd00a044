"""A suite that nothing fails is worth nothing: devices with one fault each, and the test that must see it."""

import inspect
import itertools
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
import torch

from blendhub import Span
from blendhub.contracts import Device, PagedLayer, Segment, Transfer
from blendhub.errors import InvalidInput, LayoutMismatch, Unsupported
from blendhub.layout import KVLayout
from blendhub.testing.device_reference import Finished, ReferenceDevice, decoded, encoded, turned
from blendhub.testing.devices import DeviceSuite
from blendhub.testing.devices.copying import SIZES
from blendhub.testing.devices.world import Setup, World

pytestmark = pytest.mark.slow

replace = msgspec.structs.replace


class TouchesTheSkippedPrefix(ReferenceDevice):
    def load(self, segments: Sequence[Segment], block_ids: Any, skip_prefix_n_tokens: int = 0) -> Transfer:
        return super().load(segments, block_ids, 0)


class SkipsWholeBlocks(ReferenceDevice):
    def load(self, segments: Sequence[Segment], block_ids: Any, skip_prefix_n_tokens: int = 0) -> Transfer:
        return super().load(segments, block_ids, skip_prefix_n_tokens // self._block_size * self._block_size)


class LoadsWholeChunks(ReferenceDevice):
    """As if every segment went on to the end of its shard."""

    def load(self, segments: Sequence[Segment], block_ids: Any, skip_prefix_n_tokens: int = 0) -> Transfer:
        super().load(segments, block_ids, skip_prefix_n_tokens)
        ends = sorted([len(block_ids) * self._block_size, *(segment.span.start for segment in segments)])
        for segment in segments:
            start = segment.span.start
            end = min(start + self._layout.chunk_tokens - segment.row, *(end for end in ends if end > start))
            super().load([replace(segment, span=Span(start, end))], block_ids, skip_prefix_n_tokens)
        return Finished()


class FillsHoles(ReferenceDevice):
    """Writes to holes what they hold already."""

    def load(self, segments: Sequence[Segment], block_ids: Any, skip_prefix_n_tokens: int = 0) -> Transfer:
        done = super().load(segments, block_ids, skip_prefix_n_tokens)
        for tensors in self._bits:
            for bits in tensors:
                bits[...] = encoded(decoded(bits, self._layout.dtype), self._layout.dtype)
        return done


class ForgetsTheRow(ReferenceDevice):
    def load(self, segments: Sequence[Segment], block_ids: Any, skip_prefix_n_tokens: int = 0) -> Transfer:
        return super().load([replace(segment, row=0) for segment in segments], block_ids, skip_prefix_n_tokens)


class SavesFromRowZero(ReferenceDevice):
    def save(self, segments: Sequence[Segment], block_ids: Any) -> Transfer:
        return super().save([replace(segment, row=0) for segment in segments], block_ids)


class TurnsTheWrongWay(ReferenceDevice):
    def _turned(self, key: Any, rotation: Any, old: int, new: int) -> Any:
        return turned(key, rotation, new, old)


class ForgetsTheOffset(ReferenceDevice):
    def _turned(self, key: Any, rotation: Any, old: int, new: int) -> Any:
        return turned(key, replace(rotation, offset=0), old, new)


class PairsHalvesAlways(ReferenceDevice):
    def _turned(self, key: Any, rotation: Any, old: int, new: int) -> Any:
        return turned(key, replace(rotation, neox=True), old, new)


class KeepsTheScale(ReferenceDevice):
    """Takes the new row for a rotation by itself, and so scales twice."""

    def _turned(self, key: Any, rotation: Any, old: int, new: int) -> Any:
        after, missed = turned(key, rotation, old, new)
        scale = np.hypot(*rotation.cos_sin[new].double().numpy().reshape(2, -1)[:, 0])
        after[missed > 0] *= scale
        return after, missed


class Truncates(ReferenceDevice):
    def _turned(self, key: Any, rotation: Any, old: int, new: int) -> Any:
        after, missed = turned(key, rotation, old, new)
        rounded = decoded(encoded(after, self._layout.dtype), self._layout.dtype)
        away = np.abs(rounded) > np.abs(after)
        after[away] = decoded(encoded(rounded, self._layout.dtype) - 1, self._layout.dtype)[away]
        return after, missed


class TurnsTwoRoundings(ReferenceDevice):
    def _turned(self, key: Any, rotation: Any, old: int, new: int) -> Any:
        once, _ = turned(key, rotation, old, 0)
        return turned(decoded(encoded(once, self._layout.dtype), self._layout.dtype), rotation, 0, new)


class ForgetsWhatWasSkippedInTurning(ReferenceDevice):
    """Turns the first token that it loads as if it were the segment's first."""

    def load(self, segments: Sequence[Segment], block_ids: Any, skip_prefix_n_tokens: int = 0) -> Transfer:
        return super().load(
            [
                replace(segment, source_start=segment.source_start - max(0, skip_prefix_n_tokens - segment.span.start))
                for segment in segments
            ],
            block_ids,
            skip_prefix_n_tokens,
        )


class TurnsAllLayersAlike(ReferenceDevice):
    def attach(self, layers: Sequence[PagedLayer], block_size: int, layout: KVLayout) -> None:
        super().attach([replace(layer, rotation=layers[0].rotation) for layer in layers], block_size, layout)


class WantsWholeTensors(ReferenceDevice):
    def attach(self, layers: Sequence[PagedLayer], block_size: int, layout: KVLayout) -> None:
        whole = [replace(layer, tensors=tuple(t.contiguous() for t in layer.tensors)) for layer in layers]
        super().attach(whole, block_size, layout)


class WantsNarrowTables(ReferenceDevice):
    """Reads the rows of a table as if they adjoined."""

    def attach(self, layers: Sequence[PagedLayer], block_size: int, layout: KVLayout) -> None:
        read = [
            replace(
                one, rotation=one.rotation and replace(one.rotation, cos_sin=_as_if_adjoining(one.rotation.cos_sin))
            )
            for one in layers
        ]
        super().attach(read, block_size, layout)


def _as_if_adjoining(table: Any) -> Any:
    return table.as_strided(table.shape, (table.shape[1], 1))


class WantsNumbers(ReferenceDevice):
    """As the types of tensors tell them."""

    def _check(self, layer: PagedLayer, block_size: int, layout: KVLayout) -> None:
        if layer.tensors[0].dtype == torch.uint8:
            raise LayoutMismatch("these are bytes")
        super()._check(layer, block_size, layout)


class AttachesAgain(ReferenceDevice):
    def attach(self, layers: Sequence[PagedLayer], block_size: int, layout: KVLayout) -> None:
        self._layers = None
        super().attach(layers, block_size, layout)


class GoesOnAfterClose(ReferenceDevice):
    def close(self) -> None:
        pass


class TakesAnyArena(ReferenceDevice):
    def pin(self, arena: Any) -> None:
        self._arena = arena


class FailsInItsOwnWords(ReferenceDevice):
    """Whatever goes wrong."""

    def _ready(self) -> Any:
        assert self._arena is not None and self._layers is not None
        return self._arena, self._layers

    def save(self, segments: Sequence[Segment], block_ids: Any) -> Transfer:
        if self._arena is not None and not self._arena.flags.writeable:
            raise ValueError("assignment destination is read-only")
        return super().save(segments, block_ids)


class BelievesAnything(ReferenceDevice):
    def _check(self, layer: PagedLayer, block_size: int, layout: KVLayout) -> None:
        pass


class CopiesBeforeItChecks(ReferenceDevice):
    def load(self, segments: Sequence[Segment], block_ids: Any, skip_prefix_n_tokens: int = 0) -> Transfer:
        for segment in segments:
            super().load([segment], block_ids, skip_prefix_n_tokens)
        return Finished()

    def save(self, segments: Sequence[Segment], block_ids: Any) -> Transfer:
        for segment in segments:
            super().save([segment], block_ids)
        return Finished()


class KeepsTheFirstArena(ReferenceDevice):
    def pin(self, arena: Any) -> None:
        if self._arena is None:
            super().pin(arena)


class NeverLetsGo(ReferenceDevice):
    held: ClassVar[list[Any]] = []

    def pin(self, arena: Any) -> None:
        super().pin(arena)
        self.held.append(arena)


class CopiesWhenAsked(ReferenceDevice):
    """Leaves the copy to the one who waits."""

    def load(self, segments: Sequence[Segment], block_ids: Any, skip_prefix_n_tokens: int = 0) -> Transfer:
        load = super().load

        class Later(Finished):
            def wait(self) -> None:
                load(segments, block_ids, skip_prefix_n_tokens)

        return Later()


class ClosesOnce(ReferenceDevice):
    def close(self) -> None:
        if self._closed:
            raise InvalidInput("closed already")
        super().close()


FAULTS = [
    (TouchesTheSkippedPrefix, "test_the_skipped_prefix_is_not_touched"),
    (TouchesTheSkippedPrefix, "test_any_transfers"),
    (SkipsWholeBlocks, "test_the_skipped_prefix_is_not_touched"),
    (SkipsWholeBlocks, "test_any_transfers"),
    (LoadsWholeChunks, "test_holes_are_not_touched"),
    (LoadsWholeChunks, "test_any_transfers"),
    (FillsHoles, "test_every_bit_is_copied"),
    (ForgetsTheRow, "test_segments_begin_within_shards_and_blocks"),
    (ForgetsTheRow, "test_any_transfers"),
    (SavesFromRowZero, "test_segments_begin_within_shards_and_blocks"),
    (TurnsTheWrongWay, "test_keys_are_turned"),
    (ForgetsTheOffset, "test_every_rotation"),
    (ForgetsTheOffset, "test_keys_and_values_of_a_joint_latent"),
    (PairsHalvesAlways, "test_every_rotation"),
    (KeepsTheScale, "test_every_rotation"),
    (Truncates, "test_every_rotation"),
    (TurnsTwoRoundings, "test_every_rotation"),
    (ForgetsWhatWasSkippedInTurning, "test_what_follows_a_skipped_prefix_is_turned_from_its_own_position"),
    (TurnsAllLayersAlike, "test_layers_turn_each_in_its_own_way"),
    (WantsWholeTensors, "test_every_bit_is_copied"),
    (WantsNarrowTables, "test_a_table_may_be_part_of_a_wider_one"),
    (WantsNumbers, "test_numbers_of_8_bits_may_be_kept_as_bytes"),
    (WantsWholeTensors, "test_pages_of_all_layers_may_share_one_allocation"),
    (AttachesAgain, "test_a_device_is_attached_once"),
    (GoesOnAfterClose, "test_nothing_is_copied_after_close"),
    (TakesAnyArena, "test_an_arena_is_a_flat_array_of_bytes"),
    (FailsInItsOwnWords, "test_nothing_is_copied_before_attach_and_pin"),
    (FailsInItsOwnWords, "test_an_arena_that_is_read_only_serves_loads_only"),
    (BelievesAnything, "test_pages_that_are_not_what_the_layout_says"),
    (BelievesAnything, "test_a_format_that_nobody_knows"),
    (CopiesBeforeItChecks, "test_invalid_segments_change_nothing"),
    (CopiesBeforeItChecks, "test_a_block_that_does_not_exist_changes_nothing"),
    (CopiesBeforeItChecks, "test_positions_that_the_rotation_does_not_know_change_nothing"),
    (CopiesBeforeItChecks, "test_segments_that_overlap_change_nothing"),
    (KeepsTheFirstArena, "test_another_arena_replaces_the_first"),
    (NeverLetsGo, "test_closing_lets_go_of_arena_and_pages"),
    (NeverLetsGo, "test_an_arena_of_shared_memory"),
    (CopiesWhenAsked, "test_polling_ends_without_waiting"),
    (CopiesWhenAsked, "test_closing_waits_for_what_is_under_way"),
    (ClosesOnce, "test_closing_twice"),
]


@pytest.mark.usefixtures("without_shrinking")
@pytest.mark.parametrize("faulty, test", FAULTS, ids=lambda value: getattr(value, "__name__", value))
def test_suite_catches(faulty: type[ReferenceDevice], test: str) -> None:
    class Suite(DeviceSuite):
        def create(self) -> Device:
            return faulty()

    assert not _passes(Suite(), test), f"{test} lets {faulty.__name__} pass"


@pytest.mark.usefixtures("without_shrinking")
@pytest.mark.parametrize("test", sorted({test for _, test in FAULTS}))
def test_suite_lets_a_sound_device_pass(test: str) -> None:
    class Suite(DeviceSuite):
        def create(self) -> Device:
            return ReferenceDevice()

    assert _passes(Suite(), test)


def _passes(suite: DeviceSuite, name: str) -> bool:
    """Run one test of a suite, for all values of its parameters, as pytest would."""
    test = getattr(suite, name)
    marks = [mark for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize"]
    wanted = inspect.signature(test).parameters
    for values in itertools.product(*(mark.args[1] for mark in marks), SIZES if "sized" in wanted else [SIZES[-1]]):
        given = {mark.args[0]: value for mark, value in zip(marks, values[:-1], strict=True)}
        try:
            test(**given, **_fixtures(suite, wanted, values[-1]))
        except pytest.skip.Exception:
            continue
        except (Exception, pytest.fail.Exception):
            return False
    return True


def _fixtures(suite: DeviceSuite, wanted: Any, sizes: tuple[int, int]) -> dict[str, Any]:
    def make_world(setup: Setup) -> World:
        return World(suite.create(), suite.torch_type, setup)

    block_size, chunk_tokens = sizes
    made = {
        "device": suite.create,
        "make_world": lambda: make_world,
        "world": lambda: make_world(suite.setup()),
        "sized": lambda: make_world(
            suite.setup(
                block_size=block_size,
                chunk_tokens=chunk_tokens,
                n_blocks=60 // block_size + 4,
                n_shards=60 // chunk_tokens + 2,
            )
        ),
    }
    return {name: make() for name, make in made.items() if name in wanted}


class ServesLittle(ReferenceDevice):
    """Without a fault there is nothing to catch, and a suite may be narrowed to what a device serves."""

    formats: ClassVar = ("packed_transposed", "split")
    dtypes: ClassVar = ("int8", "bfloat16", "float8_e4m3")

    def attach(self, layers: Sequence[PagedLayer], block_size: int, layout: KVLayout) -> None:
        if layout.dtype not in self.dtypes or any(layer.format not in self.formats for layer in layers):
            raise Unsupported(f"only {self.formats} of {self.dtypes} are served")
        super().attach(layers, block_size, layout)


class TestServesLittle(DeviceSuite):
    formats = ServesLittle.formats
    dtypes = ServesLittle.dtypes

    def create(self) -> Device:
        return ServesLittle()
