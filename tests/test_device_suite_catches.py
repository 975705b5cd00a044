"""Devices with one fault each, and the test of the device suite that must catch it."""

import inspect
import itertools
import threading
import time
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
import torch

from blendhub import Span
from blendhub.contracts import (
    AttentionRules,
    ChosenAttention,
    ChosenTokens,
    Device,
    PagedLayer,
    Segment,
    Transfer,
)
from blendhub.core.errors import InvalidInput, LayoutMismatch, Unsupported
from blendhub.core.layout import KVLayout
from blendhub.testing.attention_reference import ReferenceAttention
from blendhub.testing.device_reference import (
    CompletedTransfer,
    ReferenceDevice,
    decoded,
    encoded,
    rotated,
    torch_type,
)
from blendhub.testing.devices import DeviceSuite
from blendhub.testing.devices.device_harness import DeviceHarness, DeviceSetup
from tests.suite_runs import all_tests

pytestmark = pytest.mark.slow

replace = msgspec.structs.replace


class TouchesTheSkippedPrefix(ReferenceDevice):
    def load(self, segments: Sequence[Segment], block_ids: Any, skip_prefix_n_tokens: int = 0) -> Transfer:
        return super().load(segments, block_ids, 0)


class SkipsWholeBlocks(ReferenceDevice):
    def load(self, segments: Sequence[Segment], block_ids: Any, skip_prefix_n_tokens: int = 0) -> Transfer:
        return super().load(segments, block_ids, skip_prefix_n_tokens // self._block_size * self._block_size)


class LoadsWholeChunks(ReferenceDevice):
    """Extends every segment to the end of its shard."""

    def load(self, segments: Sequence[Segment], block_ids: Any, skip_prefix_n_tokens: int = 0) -> Transfer:
        super().load(segments, block_ids, skip_prefix_n_tokens)
        ends = sorted([len(block_ids) * self._block_size, *(segment.span.start for segment in segments)])
        for segment in segments:
            start = segment.span.start
            end = min(start + self._layout.chunk_tokens - segment.row, *(end for end in ends if end > start))
            super().load([replace(segment, span=Span(start, end))], block_ids, skip_prefix_n_tokens)
        return CompletedTransfer()


class FillsHoles(ReferenceDevice):
    """Decodes and encodes all pages, which changes the bits of some NaNs."""

    def load(self, segments: Sequence[Segment], block_ids: Any, skip_prefix_n_tokens: int = 0) -> Transfer:
        done = super().load(segments, block_ids, skip_prefix_n_tokens)
        for tensors in self._bits:
            for bits in tensors:
                bits[...] = encoded(decoded(bits, self._layout.dtype), self._layout.dtype)
        return done


class IgnoresTheRow(ReferenceDevice):
    def load(self, segments: Sequence[Segment], block_ids: Any, skip_prefix_n_tokens: int = 0) -> Transfer:
        return super().load([replace(segment, row=0) for segment in segments], block_ids, skip_prefix_n_tokens)


class SavesFromRowZero(ReferenceDevice):
    def save(self, segments: Sequence[Segment], block_ids: Any) -> Transfer:
        return super().save([replace(segment, row=0) for segment in segments], block_ids)


class RotatesTheWrongWay(ReferenceDevice):
    def _rotated(self, key: Any, rotation: Any, old: int, new: int) -> Any:
        return rotated(key, rotation, new, old)


class IgnoresTheOffset(ReferenceDevice):
    def _rotated(self, key: Any, rotation: Any, old: int, new: int) -> Any:
        return rotated(key, replace(rotation, offset=0), old, new)


class AssumesNeox(ReferenceDevice):
    def _rotated(self, key: Any, rotation: Any, old: int, new: int) -> Any:
        return rotated(key, replace(rotation, neox=True), old, new)


class ScalesTwice(ReferenceDevice):
    """Applies the new row's scale to keys that the old row has scaled already."""

    def _rotated(self, key: Any, rotation: Any, old: int, new: int) -> Any:
        after, float32_error = rotated(key, rotation, old, new)
        scale = np.hypot(*rotation.cos_sin[new].double().numpy().reshape(2, -1)[:, 0])
        after[float32_error > 0] *= scale
        return after, float32_error


class Truncates(ReferenceDevice):
    def _rotated(self, key: Any, rotation: Any, old: int, new: int) -> Any:
        after, float32_error = rotated(key, rotation, old, new)
        rounded = decoded(encoded(after, self._layout.dtype), self._layout.dtype)
        away = np.abs(rounded) > np.abs(after)
        after[away] = decoded(encoded(rounded, self._layout.dtype) - 1, self._layout.dtype)[away]
        return after, float32_error


class RoundsTwice(ReferenceDevice):
    def _rotated(self, key: Any, rotation: Any, old: int, new: int) -> Any:
        once, _ = rotated(key, rotation, old, 0)
        return rotated(decoded(encoded(once, self._layout.dtype), self._layout.dtype), rotation, 0, new)


class IgnoresTheSkippedPrefixInRotation(ReferenceDevice):
    """Rotates the first token that it loads as if it were the segment's first one."""

    def load(self, segments: Sequence[Segment], block_ids: Any, skip_prefix_n_tokens: int = 0) -> Transfer:
        return super().load(
            [
                replace(segment, source_start=segment.source_start - max(0, skip_prefix_n_tokens - segment.span.start))
                for segment in segments
            ],
            block_ids,
            skip_prefix_n_tokens,
        )


class RotatesAllLayersAlike(ReferenceDevice):
    def attach(self, layers: Sequence[PagedLayer], block_size: int, layout: KVLayout) -> None:
        super().attach([replace(layer, rotation=layers[0].rotation) for layer in layers], block_size, layout)


class CopiesStridedTensors(ReferenceDevice):
    def attach(self, layers: Sequence[PagedLayer], block_size: int, layout: KVLayout) -> None:
        whole = [replace(layer, tensors=tuple(t.contiguous() for t in layer.tensors)) for layer in layers]
        super().attach(whole, block_size, layout)


class AssumesContiguousTables(ReferenceDevice):
    """Reads the rows of a table as if they were contiguous."""

    def attach(self, layers: Sequence[PagedLayer], block_size: int, layout: KVLayout) -> None:
        read = [
            replace(
                one, rotation=one.rotation and replace(one.rotation, cos_sin=_as_if_contiguous(one.rotation.cos_sin))
            )
            for one in layers
        ]
        super().attach(read, block_size, layout)


def _as_if_contiguous(table: Any) -> Any:
    return table.as_strided(table.shape, torch.empty(table.shape, device="meta").stride())


class RequiresTheLayoutsTensorType(ReferenceDevice):
    """Refuses bytes, though 8-bit dtypes may be kept in tensors of bytes."""

    def _check(self, layer: PagedLayer, block_size: int, layout: KVLayout) -> None:
        if layer.tensors[0].dtype == torch.uint8:
            raise LayoutMismatch("these are bytes")
        super()._check(layer, block_size, layout)


class KnowsTheLastGroupOnly(ReferenceDevice):
    def attach(self, layers: Sequence[PagedLayer], block_size: int, layout: KVLayout) -> None:
        self._layers = None
        super().attach(layers, block_size, layout)

    def load(self, segments: Sequence[Segment], block_ids: Any, skip_prefix_n_tokens: int = 0, group: int = 0) -> Any:
        return super().load(segments, block_ids, skip_prefix_n_tokens)

    def save(self, segments: Sequence[Segment], block_ids: Any, group: int = 0) -> Any:
        return super().save(segments, block_ids)


class TakesAnyChunkSize(ReferenceDevice):
    def _attach_group(self, layers: Sequence[PagedLayer], block_size: int, layout: KVLayout) -> None:
        pass


class ContinuesAfterClose(ReferenceDevice):
    def close(self) -> None:
        pass


class AcceptsAnyArena(ReferenceDevice):
    def pin(self, arena: Any, progress: Any = None) -> None:
        self._arena = arena


class RaisesOtherErrors(ReferenceDevice):
    """Raises AssertionError and ValueError instead of InvalidInput."""

    def _ready(self) -> Any:
        assert self._arena is not None and self._layers is not None
        return self._arena, self._layers

    def save(self, segments: Sequence[Segment], block_ids: Any) -> Transfer:
        if self._arena is not None and not self._arena.flags.writeable:
            raise ValueError("assignment destination is read-only")
        return super().save(segments, block_ids)


class ChecksNothing(ReferenceDevice):
    def _check(self, layer: PagedLayer, block_size: int, layout: KVLayout) -> None:
        pass


class CopiesBeforeItChecks(ReferenceDevice):
    def load(self, segments: Sequence[Segment], block_ids: Any, skip_prefix_n_tokens: int = 0) -> Transfer:
        for segment in segments:
            super().load([segment], block_ids, skip_prefix_n_tokens)
        return CompletedTransfer()

    def save(self, segments: Sequence[Segment], block_ids: Any) -> Transfer:
        for segment in segments:
            super().save([segment], block_ids)
        return CompletedTransfer()


class KeepsTheFirstArena(ReferenceDevice):
    def pin(self, arena: Any, progress: Any = None) -> None:
        if self._arena is None:
            super().pin(arena)


class NeverReleasesArenas(ReferenceDevice):
    held: ClassVar[list[Any]] = []

    def pin(self, arena: Any, progress: Any = None) -> None:
        super().pin(arena)
        self.held.append(arena)


class CopiesOnlyInWait(ReferenceDevice):
    """Copies when ``wait`` is called, not before."""

    def load(self, segments: Sequence[Segment], block_ids: Any, skip_prefix_n_tokens: int = 0) -> Transfer:
        load = super().load

        class Later(CompletedTransfer):
            def wait(self) -> None:
                load(segments, block_ids, skip_prefix_n_tokens)

        return Later()


class KeepsTensorsOfTheFirstThread(ReferenceDevice):
    """Writes the arena through a tensor that ``pin`` makes in the mode of its caller."""

    def pin(self, arena: Any, progress: Any = None) -> None:
        super().pin(arena)
        self._tensor = torch.from_numpy(arena).view(torch.uint8)

    def save(self, segments: Sequence[Segment], block_ids: Any, group: int = 0) -> Transfer:
        self._tensor[:0] = self._tensor[:0]
        return super().save(segments, block_ids, group)


class ClosesOnce(ReferenceDevice):
    def close(self) -> None:
        if self._closed:
            raise InvalidInput("closed already")
        super().close()


class SavesNothing(ReferenceDevice):
    def save(self, segments: Sequence[Segment], block_ids: Any) -> Transfer:
        return super().save([], block_ids)


class SavesEachSegmentOnce(ReferenceDevice):
    def __init__(self) -> None:
        super().__init__()
        self._saved: list[Segment] = []

    def save(self, segments: Sequence[Segment], block_ids: Any) -> Transfer:
        fresh = [segment for segment in segments if segment not in self._saved]
        self._saved += fresh
        return super().save(fresh, block_ids)


class SavesFromTheSource(ReferenceDevice):
    def save(self, segments: Sequence[Segment], block_ids: Any) -> Transfer:
        spans = [Span(one.source_start, one.source_start + len(one.span)) for one in segments]
        moved = [replace(one, span=span) for one, span in zip(segments, spans, strict=True)]
        return super().save(moved, block_ids)


class RefusesSavesThatOverlap(ReferenceDevice):
    def save(self, segments: Sequence[Segment], block_ids: Any) -> Transfer:
        self._check_load(segments, 0)
        return super().save(segments, block_ids)


class RefusesNothingToLoad(ReferenceDevice):
    def load(self, segments: Sequence[Segment], block_ids: Any, skip_prefix_n_tokens: int = 0) -> Transfer:
        if not segments:
            raise InvalidInput("nothing is to be loaded")
        return super().load(segments, block_ids, skip_prefix_n_tokens)


class LoadsAThousandTokens(ReferenceDevice):
    def load(self, segments: Sequence[Segment], block_ids: Any, skip_prefix_n_tokens: int = 0) -> Transfer:
        return super().load([one for one in segments if one.span.end <= 1000], block_ids, skip_prefix_n_tokens)


class ExpectsAscendingSegments(ReferenceDevice):
    def load(self, segments: Sequence[Segment], block_ids: Any, skip_prefix_n_tokens: int = 0) -> Transfer:
        ends = np.maximum.accumulate([0, *(one.span.end for one in segments)])
        ascending = [one for one, end in zip(segments, ends, strict=False) if one.span.start >= end]
        return super().load(ascending, block_ids, skip_prefix_n_tokens)


class MovesAllAsTheFirst(ReferenceDevice):
    def load(self, segments: Sequence[Segment], block_ids: Any, skip_prefix_n_tokens: int = 0) -> Transfer:
        moved = [segments[0].source_start - segments[0].span.start + one.span.start for one in segments]
        alike = [replace(one, source_start=start) for one, start in zip(segments, moved, strict=True)]
        return super().load(alike, block_ids, skip_prefix_n_tokens)


class ChecksTheWholeTable(ReferenceDevice):
    def _check_segments(self, segments: Sequence[Segment], block_ids: Any) -> None:
        super()._check_segments(segments, block_ids)
        if not all(0 <= block < self._n_blocks for block in block_ids):
            raise InvalidInput("there is no such block")


class KnowsThreeHeads(ReferenceDevice):
    def _place(self, index: int, arrays: Any, place: tuple[int, int, int]) -> Any:
        block, slot, head = place
        return super()._place(index, arrays, (block, slot, min(head, 2)))


class KnowsPositionsBelow128K(ReferenceDevice):
    def _rotated(self, key: Any, rotation: Any, old: int, new: int) -> Any:
        return rotated(key, rotation, min(old, 2**17 - 1), new)


class Overflows(ReferenceDevice):
    def _rotated(self, key: Any, rotation: Any, old: int, new: int) -> Any:
        after, float32_error = rotated(key, rotation, old, new)
        after[np.abs(after) > torch.finfo(torch_type(self._layout.dtype)).max] = np.nan
        return after, float32_error


class RecomputesNoTokens(ReferenceDevice):
    block_tokens = 0


class DropsThePendingTransfer(ReferenceDevice):
    """Copies when ``wait`` is called, and only for the transfer that was started last."""

    def load(self, segments: Sequence[Segment], block_ids: Any, skip_prefix_n_tokens: int = 0) -> Transfer:
        load, device = super().load, self

        class Later(CompletedTransfer):
            def wait(self) -> None:
                if device._last is self:
                    load(segments, block_ids, skip_prefix_n_tokens)

        self._last = Later()
        return self._last


class SnapshotDevice(ReferenceDevice):
    """Keeps a copy of the pages as they were at ``begin_step``."""

    _snapshot: list[Any] | None = None

    def begin_step(self) -> None:
        self._snapshot = self._copied()

    def _copied(self) -> list[Any]:
        return [bits.copy() for tensors in self._bits for bits in tensors]

    def _write(self, arrays: list[Any], where: Any = None) -> None:
        pages = [bits for tensors in self._bits for bits in tensors]
        for number, (bits, array) in enumerate(zip(pages, arrays, strict=True)):
            np.copyto(bits, array, where=True if where is None else where[number])


class FollowsTheFirstStep(SnapshotDevice):
    """What the engine wrote after the first ``begin_step`` arrives after a load and overwrites it."""

    def begin_step(self) -> None:
        if self._snapshot is None:
            super().begin_step()

    def load(self, segments: Sequence[Segment], block_ids: Any, skip_prefix_n_tokens: int = 0) -> Transfer:
        before = self._copied()
        done = super().load(segments, block_ids, skip_prefix_n_tokens)
        if self._snapshot is not None:
            self._write(before, [one != other for one, other in zip(before, self._snapshot, strict=True)])
        return done


class LoadsIntoThePagesOfTheStepsBegin(SnapshotDevice):
    def load(self, segments: Sequence[Segment], block_ids: Any, skip_prefix_n_tokens: int = 0) -> Transfer:
        if self._snapshot is not None:
            self._write(self._snapshot)
        return super().load(segments, block_ids, skip_prefix_n_tokens)


class SavesThePagesOfTheStepsBegin(SnapshotDevice):
    def save(self, segments: Sequence[Segment], block_ids: Any) -> Transfer:
        now = self._copied()
        if self._snapshot is not None:
            self._write(self._snapshot)
        done = super().save(segments, block_ids)
        self._write(now)
        return done


class PinsWhatIsNotReserved(ReferenceDevice):
    def pin(self, arena: Any, progress: Any = None) -> None:
        super().pin(arena)
        arena[::4096].sum()


class PinsInTheCallersThread(ReferenceDevice):
    """Waits until the arena is reserved, but not for ever."""

    def pin(self, arena: Any, progress: Any = None) -> None:
        super().pin(arena)
        deadline = time.monotonic() + 2
        while progress is not None and progress().left and time.monotonic() < deadline:
            time.sleep(0.01)


class AsksForProgressForEver(ReferenceDevice):
    def pin(self, arena: Any, progress: Any = None) -> None:
        super().pin(arena)
        self._ends = threading.Event()
        if progress is not None:
            threading.Thread(target=self._ask, args=(progress,), daemon=True).start()

    def _ask(self, progress: Any) -> None:
        for _ in range(1000):
            if not self._ends.wait(0.01):
                progress()

    def close(self) -> None:
        self._ends.set()
        super().close()


class RefusesToCopyWhileItIsReserved(ReferenceDevice):
    def pin(self, arena: Any, progress: Any = None) -> None:
        super().pin(arena)
        self._progress = progress

    def _ready(self) -> Any:
        if self._progress is not None and self._progress().left:
            raise InvalidInput("the arena is still being reserved")
        return super()._ready()


class AttendingDevice(ReferenceDevice):
    """A correct device with attention."""

    attends: type[ReferenceAttention] = ReferenceAttention

    def attention(self, rules: Sequence[AttentionRules], dtype: torch.dtype) -> ChosenAttention:
        if self._others:
            raise Unsupported("there are several groups")
        assert self._layers is not None
        return self.attends(self._layers, self._block_size, self._layout, rules)


class AttendsToTheFirstGroup(AttendingDevice):
    def attention(self, rules: Sequence[AttentionRules], dtype: torch.dtype) -> ChosenAttention:
        self._others = []
        return super().attention(rules, dtype)


def ignoring(**rules: Any) -> type[AttendingDevice]:
    """A device that takes these rules for those of all layers."""

    class Ignoring(ReferenceAttention):
        def attend(self, layer: int, queries: torch.Tensor, output: torch.Tensor) -> None:
            self._rules = [one._replace(**rules) for one in self._rules]
            super().attend(layer, queries, output)

    return type(f"Ignores_{'_'.join(rules)}", (AttendingDevice,), {"attends": Ignoring})


class SeesTheFuture(ReferenceAttention):
    def begin(self, tokens: ChosenTokens) -> None:
        super().begin(tokens._replace(positions=np.full_like(tokens.positions, tokens.positions.max())))


class ExpectsAscendingTokens(ReferenceAttention):
    def begin(self, tokens: ChosenTokens) -> None:
        super().begin(tokens._replace(positions=np.sort(tokens.positions)))


class KnowsOnePrompt(ReferenceAttention):
    def begin(self, tokens: ChosenTokens) -> None:
        super().begin(tokens._replace(blocks=np.repeat(tokens.blocks[:1], len(tokens.blocks), 0)))


class ReadsTheNextBlock(ReferenceAttention):
    def begin(self, tokens: ChosenTokens) -> None:
        super().begin(tokens._replace(blocks=np.roll(tokens.blocks, 1, axis=1)))


class KeepsTheBlocksOfTheFirstForward(ReferenceAttention):
    _tokens: Any = None

    def begin(self, tokens: ChosenTokens) -> None:
        first = self._tokens.blocks if self._tokens else tokens.blocks
        super().begin(tokens._replace(blocks=first))


class AnswersForTheFirstLayer(ReferenceAttention):
    def attend(self, layer: int, queries: torch.Tensor, output: torch.Tensor) -> None:
        super().attend(0, queries, output)


class SharesKeysInTurn(ReferenceAttention):
    """A head of keys serves every n-th head of queries instead of neighbours."""

    def attend(self, layer: int, queries: torch.Tensor, output: torch.Tensor) -> None:
        heads = torch.arange(queries.shape[1]).view(-1, self._planes[layer][0].shape[1]).T.flatten()
        answers = torch.empty_like(output)
        super().attend(layer, queries[:, heads], answers)
        output[:, heads] = answers


class ExpectsContiguousQueries(ReferenceAttention):
    def attend(self, layer: int, queries: torch.Tensor, output: torch.Tensor) -> None:
        super().attend(layer, _as_if_contiguous(queries), output)


class WritesContiguousAnswers(ReferenceAttention):
    def attend(self, layer: int, queries: torch.Tensor, output: torch.Tensor) -> None:
        super().attend(layer, queries, _as_if_contiguous(output))


def attending(attends: type[ReferenceAttention]) -> type[AttendingDevice]:
    return type(attends.__name__, (AttendingDevice,), {"attends": attends})


FAULTS = [
    (TouchesTheSkippedPrefix, "test_the_skipped_prefix_is_not_touched"),
    (TouchesTheSkippedPrefix, "test_any_transfers"),
    (SkipsWholeBlocks, "test_the_skipped_prefix_is_not_touched"),
    (SkipsWholeBlocks, "test_any_transfers"),
    (LoadsWholeChunks, "test_holes_are_not_touched"),
    (LoadsWholeChunks, "test_any_transfers"),
    (FillsHoles, "test_every_bit_is_copied"),
    (IgnoresTheRow, "test_segments_begin_within_shards_and_blocks"),
    (IgnoresTheRow, "test_any_transfers"),
    (SavesFromRowZero, "test_segments_begin_within_shards_and_blocks"),
    (RotatesTheWrongWay, "test_moved_keys_are_rotated"),
    (IgnoresTheOffset, "test_every_rotation"),
    (IgnoresTheOffset, "test_only_the_last_part_of_the_keys_is_rotated"),
    (AssumesNeox, "test_every_rotation"),
    (ScalesTwice, "test_every_rotation"),
    (Truncates, "test_every_rotation"),
    (RoundsTwice, "test_every_rotation"),
    (IgnoresTheSkippedPrefixInRotation, "test_tokens_after_a_skipped_prefix_are_rotated_from_their_own_position"),
    (RotatesAllLayersAlike, "test_each_layer_has_its_own_rotation"),
    (CopiesStridedTensors, "test_every_bit_is_copied"),
    (AssumesContiguousTables, "test_a_table_may_be_part_of_a_wider_one"),
    (RequiresTheLayoutsTensorType, "test_numbers_of_8_bits_may_be_kept_as_bytes"),
    (CopiesStridedTensors, "test_pages_of_all_layers_may_share_one_allocation"),
    (KnowsTheLastGroupOnly, "test_groups_of_layers_have_pages_and_block_tables_of_their_own"),
    (KnowsTheLastGroupOnly, "test_a_group_that_is_not_attached_is_refused"),
    (TakesAnyChunkSize, "test_groups_have_no_longer_chunks_than_the_first_one"),
    (ContinuesAfterClose, "test_nothing_is_copied_after_close"),
    (AcceptsAnyArena, "test_an_arena_is_a_flat_array_of_bytes"),
    (RaisesOtherErrors, "test_nothing_is_copied_before_attach_and_pin"),
    (RaisesOtherErrors, "test_an_arena_that_is_read_only_serves_loads_only"),
    (ChecksNothing, "test_pages_that_are_not_what_the_layout_says"),
    (ChecksNothing, "test_unsupported_formats_and_dtypes_are_refused"),
    (CopiesBeforeItChecks, "test_invalid_segments_change_nothing"),
    (CopiesBeforeItChecks, "test_a_block_that_does_not_exist_changes_nothing"),
    (CopiesBeforeItChecks, "test_positions_beyond_the_rotation_table_change_nothing"),
    (CopiesBeforeItChecks, "test_segments_that_overlap_change_nothing"),
    (KeepsTheFirstArena, "test_another_arena_replaces_the_first"),
    (NeverReleasesArenas, "test_close_releases_arena_and_pages"),
    (NeverReleasesArenas, "test_an_arena_of_shared_memory"),
    (CopiesOnlyInWait, "test_polling_ends_without_waiting"),
    (CopiesOnlyInWait, "test_close_waits_for_pending_transfers"),
    (KeepsTensorsOfTheFirstThread, "test_calls_inside_and_outside_of_inference_mode"),
    (ClosesOnce, "test_close_may_be_called_twice"),
    (SavesNothing, "test_saved_chunks_are_loaded_unchanged"),
    (SavesEachSegmentOnce, "test_transfers_see_what_was_written_before_the_call"),
    (SavesFromTheSource, "test_source_start_plays_no_part_in_saving"),
    (SavesFromTheSource, "test_rotating_forth_and_back_stays_within_rounding"),
    (RefusesSavesThatOverlap, "test_one_shard_serves_several_segments_and_one_token_several_shards"),
    (RefusesNothingToLoad, "test_an_empty_transfer_ends"),
    (LoadsAThousandTokens, "test_a_large_transfer_is_whole"),
    (ExpectsAscendingSegments, "test_segments_come_in_any_order"),
    (MovesAllAsTheFirst, "test_moved_and_unmoved_segments_side_by_side"),
    (ChecksTheWholeTable, "test_blocks_of_a_table_that_no_segment_needs_may_be_unknown"),
    (CopiesOnlyInWait, "test_the_callers_block_table_may_change_after_the_call"),
    (DropsThePendingTransfer, "test_several_transfers_may_be_pending"),
    (KnowsThreeHeads, "test_heads_and_widths"),
    (KnowsPositionsBelow128K, "test_positions_up_to_the_last_row_of_the_table"),
    (Overflows, "test_values_too_large_for_8_bits_saturate"),
    (RecomputesNoTokens, "test_block_tokens_is_a_number_of_tokens"),
    (FollowsTheFirstStep, "test_a_load_overwrites_what_the_engine_wrote_before_the_step"),
    (LoadsIntoThePagesOfTheStepsBegin, "test_a_step_writes_other_pages_than_its_loads_and_its_saves_see_them"),
    (SavesThePagesOfTheStepsBegin, "test_a_step_writes_other_pages_than_its_loads_and_its_saves_see_them"),
    (PinsWhatIsNotReserved, "test_an_arena_is_used_while_it_is_being_reserved"),
    (PinsInTheCallersThread, "test_an_arena_is_used_while_it_is_being_reserved"),
    (AsksForProgressForEver, "test_an_arena_is_used_while_it_is_being_reserved"),
    (RefusesToCopyWhileItIsReserved, "test_an_arena_is_used_while_it_is_being_reserved"),
    (AttendsToTheFirstGroup, "test_attention_over_several_groups_is_refused"),
    (attending(SeesTheFuture), "test_each_token_attends_to_the_keys_of_its_prompt_up_to_its_position"),
    (attending(ExpectsAscendingTokens), "test_each_token_attends_to_the_keys_of_its_prompt_up_to_its_position"),
    (attending(KnowsOnePrompt), "test_each_token_attends_to_the_keys_of_its_prompt_up_to_its_position"),
    (attending(ReadsTheNextBlock), "test_each_token_attends_to_the_keys_of_its_prompt_up_to_its_position"),
    (
        attending(KeepsTheBlocksOfTheFirstForward),
        "test_each_token_attends_to_the_keys_of_its_prompt_up_to_its_position",
    ),
    (attending(ExpectsContiguousQueries), "test_each_token_attends_to_the_keys_of_its_prompt_up_to_its_position"),
    (attending(WritesContiguousAnswers), "test_each_token_attends_to_the_keys_of_its_prompt_up_to_its_position"),
    (attending(SharesKeysInTurn), "test_each_layer_has_its_rules"),
    (attending(AnswersForTheFirstLayer), "test_each_layer_has_its_rules"),
    (ignoring(scale=0.2), "test_each_layer_has_its_rules"),
    (ignoring(window=None), "test_each_layer_has_its_rules"),
    (ignoring(chunk=None), "test_each_layer_has_its_rules"),
    (ignoring(soft_cap=0.0), "test_each_layer_has_its_rules"),
    (ignoring(sinks=None), "test_each_layer_has_its_rules"),
    (ignoring(latent=0), "test_pages_of_every_format"),
    (ignoring(key_scale=1.0), "test_keys_and_values_of_8_bits_have_scales"),
    (ignoring(value_scale=1.0), "test_keys_and_values_of_8_bits_have_scales"),
]


def test_a_faulty_device_proves_each_test() -> None:
    assert {test for _, test in FAULTS} == all_tests(DeviceSuite)


@pytest.mark.usefixtures("without_shrinking")
@pytest.mark.parametrize("faulty, test", FAULTS, ids=lambda value: getattr(value, "__name__", value))
def test_suite_catches(faulty: type[ReferenceDevice], test: str) -> None:
    class Suite(DeviceSuite):
        def create(self) -> Device:
            return faulty()

    assert not _passes(Suite(), test), f"{test} lets {faulty.__name__} pass"


@pytest.mark.usefixtures("without_shrinking")
@pytest.mark.parametrize("test", sorted({test for _, test in FAULTS}))
def test_suite_passes_a_correct_device(test: str) -> None:
    class Suite(DeviceSuite):
        def create(self) -> Device:
            return AttendingDevice()

    assert _passes(Suite(), test)


def _passes(suite: DeviceSuite, name: str) -> bool:
    """Run one test of a suite, for all values of its parameters, as pytest would."""
    test = getattr(suite, name)
    wanted = inspect.signature(test).parameters
    values = {mark.args[0]: mark.args[1] for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize"}
    values |= {name: served for name, served in suite.parameters().items() if name in wanted}
    for chosen in itertools.product(*values.values()):
        given = dict(zip(values, chosen, strict=True))
        try:
            test(**given, **_fixtures(suite, wanted))
        except pytest.skip.Exception:
            continue
        except (Exception, pytest.fail.Exception):
            return False
    return True


def _fixtures(suite: DeviceSuite, wanted: Any) -> dict[str, Any]:
    def make_harness(setup: DeviceSetup) -> DeviceHarness:
        return DeviceHarness(suite.create(), suite.torch_type, setup)

    made = {
        "device": suite.create,
        "make_harness": lambda: make_harness,
        "harness": lambda: make_harness(suite.setup()),
    }
    return {name: make() for name, make in made.items() if name in wanted}


class LimitedDevice(ReferenceDevice):
    """A correct device of few formats and dtypes: the suite may be limited to what a device supports."""

    formats: Any = ("packed_transposed", "split")
    dtypes: Any = ("int8", "bfloat16", "float8_e4m3")

    def attach(self, layers: Sequence[PagedLayer], block_size: int, layout: KVLayout) -> None:
        if layout.dtype not in self.dtypes or any(layer.format not in self.formats for layer in layers):
            raise Unsupported(f"only {self.formats} of {self.dtypes} are supported")
        super().attach(layers, block_size, layout)


class TestLimitedDevice(DeviceSuite):
    formats = LimitedDevice.formats
    dtypes = LimitedDevice.dtypes

    def create(self) -> Device:
        return LimitedDevice()
