"""Which tokens a transfer copies: those of its segments and no others.

Every test compares all bytes of pages and arena, so one token too many fails it as one too few does.
"""

from itertools import cycle, product

import numpy as np

from blendhub.testing.devices.base import DeviceTests, MakeHarness
from blendhub.testing.devices.device_harness import DeviceHarness, Rotary
from blendhub.testing.sentences import holds

SIZES = [(8, 24), (24, 8), (16, 12), (7, 5), (5, 17), (16, 16), (1, 6), (6, 1)]
"""Tokens of a block and of a chunk: equal, larger, smaller, multiples of each other or not."""

PLACES = [
    [(11, 30, 0, 0), (30, 50, 1, 0)],
    [(0, 13, 0, 0), (37, 60, 1, 0)],
    [(5, 6, 0, 0), (7, 8, 1, 0), (30, 31, 2, 0), (59, 60, 3, 0)],
    [(50, 61, 1, 4), (2, 9, 4, 0), (9, 30, 0, 0)],
    [(2, 22, 0, 0), (40, 52, 0, 6), (60, 70, 0, 14)],
    [(0, 9, 2, 15)],
    [(17, 17, 0, 0), (20, 29, 1, 0)],
    [],
]
"""Segments as their tokens, shard and row: holes at the start, in the middle, at the end, everywhere; in any order; of
one shard; the end of a shard; beside an empty segment; and nothing but a hole."""


@holds("Values are copied bit for bit, and so are keys that stay at their position")
class CopyingTests(DeviceTests):
    @holds("``load`` writes the tokens of its segments from position")
    def test_chunks_and_blocks_of_any_size(self, make_harness: MakeHarness) -> None:
        """The skipped prefix is not touched."""
        for (block_size, chunk_tokens), skipped in zip(SIZES, cycle((1, 10, 24, 57, 1000)), strict=False):
            sizes = {"n_blocks": 60 // block_size + 4, "n_shards": 60 // chunk_tokens + 2}
            harness = make_harness(self.setup(block_size=block_size, chunk_tokens=chunk_tokens, **sizes))
            harness.save(harness.chunks(3, 58))
            for n_tokens in (0, skipped):
                harness.overwrite_pages()
                harness.load(harness.chunks(3, 58), skip_prefix_n_tokens=n_tokens)

    @holds("``load`` writes the tokens of its segments from position")
    def test_segments_anywhere(self, harness: DeviceHarness) -> None:
        """Holes are not touched."""
        for places, skipped in product(PLACES, (0, 20)):
            segments = [harness.segment(start, end, shard=shard, row=row) for start, end, shard, row in places]
            harness.load(segments, skipped)
            harness.overwrite_pages()
            harness.save(segments)

    @holds("Keys are not rotated, and ``source_start`` is ignored.")
    def test_source_start_plays_no_part_in_saving(self, make_harness: MakeHarness) -> None:
        """A token may be saved to several shards."""
        harness = make_harness(self.setup(rotations=(Rotary(), None)))
        harness.save([harness.segment(2, 22, source=900), harness.segment(10, 34, shard=2, source=0)])

    def test_blocks_that_no_segment_needs_may_be_unknown(self, harness: DeviceHarness) -> None:
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
            loaded.check()
            loaded.load(loaded.chunks(7, 61), skip_prefix_n_tokens=20)
            saved.check()
            saved.overwrite_pages()
            loaded.overwrite_pages()
        for transfer in [first.start_load(first.chunks(3, 58), 9), second.start_load(second.chunks(3, 58), 30)]:
            transfer.wait()
        first.check()
        second.check()

    def test_a_large_transfer_is_whole(self, make_harness: MakeHarness) -> None:
        sizes = {"block_size": 32, "chunk_tokens": 256, "n_blocks": 70, "n_shards": 9}
        harness = make_harness(self.setup(**sizes, rotations=(None, None, None)))
        harness.save(harness.chunks(5, 2048))
        harness.overwrite_pages()
        harness.load(harness.chunks(5, 2048), skip_prefix_n_tokens=300)
