"""Devices with one fault each in what they copy and refuse, and the test that must catch it."""

from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec
import numpy as np
import torch

from blendhub import Span
from blendhub.contracts import (
    PagedLayer,
    Segment,
    Transfer,
)
from blendhub.core.errors import InvalidInput, LayoutMismatch
from blendhub.core.layout import KVLayout
from blendhub.testing.device_reference import (
    CompletedTransfer,
    ReferenceDevice,
    decoded,
    encoded,
    rotated,
)

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
                one, rotation=one.rotation and replace(one.rotation, cos_sin=as_if_contiguous(one.rotation.cos_sin))
            )
            for one in layers
        ]
        super().attach(read, block_size, layout)


def as_if_contiguous(table: Any) -> Any:
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
    (KnowsThreeHeads, "test_heads_and_widths"),
    (KnowsPositionsBelow128K, "test_positions_up_to_the_last_row_of_the_table"),
]
