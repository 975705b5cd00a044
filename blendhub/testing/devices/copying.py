"""Which tokens a transfer copies: those of its segments and no others.

Every test compares all bytes of pages and arena, so one token too many fails it as one too few does.
"""

import numpy as np
import pytest

from blendhub.testing.devices.base import DeviceTests, MakeHarness
from blendhub.testing.devices.device_harness import DeviceHarness
from blendhub.testing.sentences import holds

SIZES = [(8, 24), (24, 8), (16, 12), (12, 16), (7, 5), (5, 17), (16, 16), (1, 6), (6, 1)]
"""Tokens of a block and of a chunk: equal, larger, smaller, multiples of each other or not."""


@holds("Values are copied bit for bit, and so are keys that stay at their position")
class CopyingTests(DeviceTests):
    @pytest.fixture(params=SIZES, ids=lambda sizes: f"block {sizes[0]}, chunk {sizes[1]}")
    def sized(self, request: pytest.FixtureRequest, make_harness: MakeHarness) -> DeviceHarness:
        """Harnesses of different block and chunk sizes, each for 60 tokens or more."""
        block_size, chunk_tokens = request.param
        return make_harness(
            self.setup(
                block_size=block_size,
                chunk_tokens=chunk_tokens,
                n_blocks=60 // block_size + 4,
                n_shards=60 // chunk_tokens + 2,
            )
        )

    def test_a_run_of_chunks_is_loaded(self, sized: DeviceHarness) -> None:
        sized.load(sized.chunks(0, 60))

    def test_a_run_of_chunks_is_loaded_anywhere(self, sized: DeviceHarness) -> None:
        sized.load(sized.chunks(3, 58))

    @holds("``save`` writes the rows of its segments and nothing else.")
    def test_a_run_of_chunks_is_saved(self, sized: DeviceHarness) -> None:
        sized.save(sized.chunks(0, 60))

    @holds("``save`` writes the rows of its segments and nothing else.")
    def test_a_run_of_chunks_is_saved_from_anywhere(self, sized: DeviceHarness) -> None:
        sized.save(sized.chunks(3, 58))

    def test_saved_tokens_are_loaded_unchanged(self, sized: DeviceHarness) -> None:
        sized.save(sized.chunks(3, 58))
        sized.overwrite_pages()
        sized.load(sized.chunks(3, 58))

    @pytest.mark.parametrize("skipped", [0, 1, 3, 10, 24, 27, 40, 57, 58, 1000])
    @holds("``load`` writes the tokens of its segments from position")
    def test_the_skipped_prefix_is_not_touched(self, sized: DeviceHarness, skipped: int) -> None:
        sized.load(sized.chunks(3, 58), skip_prefix_n_tokens=skipped)

    @pytest.mark.parametrize("skipped", [0, 20])
    @pytest.mark.parametrize(
        "spans",
        [
            [(11, 30), (30, 50)],
            [(0, 13), (37, 60)],
            [(0, 13), (20, 33)],
            [(5, 6), (7, 8), (30, 31), (59, 60)],
            [(17, 17), (20, 29)],
            [],
        ],
        ids=["hole at the start", "in the middle", "at the end", "everywhere", "beside an empty segment", "only holes"],
    )
    @holds("``load`` writes the tokens of its segments from position")
    def test_holes_are_not_touched(self, harness: DeviceHarness, spans: list[tuple[int, int]], skipped: int) -> None:
        segments = [harness.segment(start, end, shard=number) for number, (start, end) in enumerate(spans)]
        harness.load(segments, skipped)
        harness.overwrite_pages()
        harness.save(segments)

    @pytest.mark.parametrize("row", [0, 1, 9, 15])
    @pytest.mark.parametrize("start", [0, 7, 8, 12])
    def test_segments_begin_within_shards_and_blocks(self, harness: DeviceHarness, start: int, row: int) -> None:
        segments = [harness.segment(start, start + 9, row=row)]
        harness.load(segments)
        harness.load(segments, skip_prefix_n_tokens=start + 4)
        harness.overwrite_pages()
        harness.save(segments)

    def test_segments_come_in_any_order(self, harness: DeviceHarness) -> None:
        harness.load(
            [harness.segment(50, 61, shard=1, row=4), harness.segment(2, 9, shard=4), harness.segment(9, 30, shard=0)],
            skip_prefix_n_tokens=5,
        )

    def test_one_shard_serves_several_segments(self, harness: DeviceHarness) -> None:
        harness.load([harness.segment(2, 22), harness.segment(40, 52, row=6), harness.segment(60, 70, row=14)])

    @holds("``save`` writes the rows of its segments and nothing else.")
    def test_one_token_is_saved_to_several_shards(self, harness: DeviceHarness) -> None:
        harness.save([harness.segment(2, 22, shard=0), harness.segment(10, 30, shard=1, row=2)])

    @holds("Keys are not rotated, and ``source_start`` is ignored.")
    def test_source_start_plays_no_part_in_saving(self, harness: DeviceHarness) -> None:
        harness.save([harness.segment(2, 22, source=900), harness.segment(30, 34, shard=2, source=0)])

    def test_a_block_table_may_be_longer_than_the_prompt(self, harness: DeviceHarness) -> None:
        harness.load([harness.segment(1, 5)])

    def test_blocks_of_a_table_that_no_segment_needs_may_be_unknown(self, harness: DeviceHarness) -> None:
        harness.block_ids = np.concatenate([harness.block_ids, np.array([-1, 2**40])])
        harness.load([harness.segment(0, 20)])
        harness.save([harness.segment(3, 20)])

    def test_the_callers_block_table_may_change_after_the_call(self, harness: DeviceHarness) -> None:
        segments = harness.chunks(0, 60)
        harness.reference.load(segments, harness.block_ids)
        lent = harness.block_ids.copy()
        transfer = harness.device.load(segments, lent)
        lent[:] = lent[::-1].copy()
        transfer.wait()
        harness.check()

    def test_a_large_transfer_is_whole(self, make_harness: MakeHarness) -> None:
        harness = make_harness(
            self.setup(block_size=32, chunk_tokens=256, n_blocks=70, n_shards=9, rotations=(None, None, None))
        )
        harness.save(harness.chunks(5, 2048))
        harness.overwrite_pages()
        harness.load(harness.chunks(5, 2048), skip_prefix_n_tokens=300)
