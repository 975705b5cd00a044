"""Which tokens a transfer copies: those of its segments and no others.

Every test compares all bytes of pages and arena, so one token too many fails it as one too few does.
"""

from itertools import cycle

import numpy as np

from blendhub.testing.devices.base import DeviceTests, MakeHarness
from blendhub.testing.devices.device_harness import DeviceHarness
from blendhub.testing.sentences import holds

SIZES = [(8, 24), (24, 8), (16, 12), (7, 5), (5, 17), (16, 16), (1, 6), (6, 1)]
"""Tokens of a block and of a chunk: equal, larger, smaller, multiples of each other or not."""


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

    @holds("A load takes each segment from a shard of the arena, or from blocks of the group's own pages:")
    def test_blocks_are_copied_to_other_blocks_from_and_to_any_token(self, make_harness: MakeHarness) -> None:
        """Beside chunks of the arena, in one load. Blocks that are read are neither whole nor in order."""
        for (block_size, chunk_tokens), skipped in zip(SIZES, cycle((0, 1, 10, 24, 57)), strict=False):
            sizes = {"n_blocks": 120 // block_size + 6, "n_shards": 60 // chunk_tokens + 2}
            harness = make_harness(self.setup(block_size=block_size, chunk_tokens=chunk_tokens, **sizes))
            n_written = 60 // block_size + 1
            harness.block_ids, harness.donors = np.split(harness.block_ids, [n_written])
            stored = harness.segment(20, 20 + chunk_tokens // 2, shard=1)
            harness.load([harness.copied(3, 20, row=5), stored, harness.copied(33, 58)], skipped)

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
            loaded.load([loaded.copied(9, 40, row=3)])
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
        harness.block_ids, harness.donors = harness.block_ids[:34], harness.block_ids[34:]
        harness.load([harness.copied(70, 1080, row=7)])
