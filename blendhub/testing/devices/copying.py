"""Which tokens a transfer copies: those of its segments and no others.

Every test compares all bytes of pages and arena, so one token too many fails it as one too few does.
"""

from collections.abc import Iterator
from itertools import product

import numpy as np

from blendhub.testing.devices.base import DeviceTests, MakeHarness
from blendhub.testing.devices.device_harness import DeviceHarness
from blendhub.testing.sentences import holds

SIZES = [(8, 24), (24, 8), (16, 12), (7, 5), (5, 17), (16, 16), (1, 6), (6, 1)]
"""Tokens of a block and of a chunk: equal, larger, smaller, multiples of each other or not."""


SPANS_WITH_HOLES = [
    [(11, 30), (30, 50)],
    [(0, 13), (37, 60)],
    [(0, 13), (20, 33)],
    [(5, 6), (7, 8), (30, 31), (59, 60)],
    [(17, 17), (20, 29)],
    [],
]
"""Holes at the start, in the middle, at the end, everywhere, beside an empty segment; and nothing but a hole."""


@holds("Values are copied bit for bit, and so are keys that stay at their position")
class CopyingTests(DeviceTests):
    def of_any_size(self, make_harness: MakeHarness) -> Iterator[DeviceHarness]:
        """Harnesses of different block and chunk sizes, each for 60 tokens or more."""
        for block_size, chunk_tokens in SIZES:
            blocks, shards = 60 // block_size + 4, 60 // chunk_tokens + 2
            yield make_harness(
                self.setup(block_size=block_size, chunk_tokens=chunk_tokens, n_blocks=blocks, n_shards=shards)
            )

    def test_saved_chunks_are_loaded_unchanged(self, make_harness: MakeHarness) -> None:
        for harness in self.of_any_size(make_harness):
            harness.save(harness.chunks(3, 58))
            harness.overwrite_pages()
            harness.load(harness.chunks(3, 58))

    @holds("``load`` writes the tokens of its segments from position")
    def test_the_skipped_prefix_is_not_touched(self, make_harness: MakeHarness) -> None:
        for harness in self.of_any_size(make_harness):
            for skipped in (1, 10, 24, 57, 1000):
                harness.load(harness.chunks(3, 58), skip_prefix_n_tokens=skipped)
                harness.overwrite_pages()

    @holds("``load`` writes the tokens of its segments from position")
    def test_holes_are_not_touched(self, harness: DeviceHarness) -> None:
        for spans, skipped in product(SPANS_WITH_HOLES, (0, 20)):
            segments = [harness.segment(start, end, shard=number) for number, (start, end) in enumerate(spans)]
            harness.load(segments, skipped)
            harness.overwrite_pages()
            harness.save(segments)

    def test_segments_begin_within_shards_and_blocks(self, harness: DeviceHarness) -> None:
        for start, row in product((0, 7, 8, 12), (0, 1, 9, 15)):
            segments = [harness.segment(start, start + 9, row=row)]
            harness.load(segments)
            harness.overwrite_pages()
            harness.load(segments, skip_prefix_n_tokens=start + 4)
            harness.overwrite_pages()
            harness.save(segments)

    def test_segments_come_in_any_order(self, harness: DeviceHarness) -> None:
        harness.load(
            [harness.segment(50, 61, shard=1, row=4), harness.segment(2, 9, shard=4), harness.segment(9, 30, shard=0)],
            skip_prefix_n_tokens=5,
        )

    def test_one_shard_serves_several_segments_and_one_token_several_shards(self, harness: DeviceHarness) -> None:
        harness.load([harness.segment(2, 22), harness.segment(40, 52, row=6), harness.segment(60, 70, row=14)])
        harness.overwrite_pages()
        harness.save([harness.segment(2, 22, shard=0), harness.segment(10, 30, shard=1, row=2)])

    @holds("Keys are not rotated, and ``source_start`` is ignored.")
    def test_source_start_plays_no_part_in_saving(self, harness: DeviceHarness) -> None:
        harness.save([harness.segment(2, 22, source=900), harness.segment(30, 34, shard=2, source=0)])

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

    @holds("A transfer copies the layers of one group")
    def test_groups_of_layers_have_pages_and_block_tables_of_their_own(self, make_harness: MakeHarness) -> None:
        """Models have several groups if some layers have windows, or heads of another width."""
        first = make_harness(self.setup(kv_heads=4, key_dim=16, value_dim=16, rotations=(None,) * 3))
        shorter = {"block_size": 5, "n_blocks": 17, "chunk_tokens": 16}
        second = make_harness(self.setup(kv_heads=1, key_dim=10, value_dim=10, **shorter))
        second.join(first, 1)
        for saved, loaded in ((first, second), (second, first)):
            saved.save(saved.chunks(3, 58))
            first.check()
            second.check()
            loaded.load(loaded.chunks(7, 61), skip_prefix_n_tokens=20)
            first.check()
            second.check()
            first.overwrite_pages()
            second.overwrite_pages()
        together = [first.start_load(first.chunks(3, 58), 9), second.start_load(second.chunks(3, 58), 30)]
        for transfer in together:
            transfer.wait()
        first.check()
        second.check()

    def test_a_large_transfer_is_whole(self, make_harness: MakeHarness) -> None:
        harness = make_harness(
            self.setup(block_size=32, chunk_tokens=256, n_blocks=70, n_shards=9, rotations=(None, None, None))
        )
        harness.save(harness.chunks(5, 2048))
        harness.overwrite_pages()
        harness.load(harness.chunks(5, 2048), skip_prefix_n_tokens=300)
