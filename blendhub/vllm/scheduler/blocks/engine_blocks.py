"""vLLM's own blocks: which of them each request has, and what its prefix cache holds."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock

from blendhub.core.spans import Span
from blendhub.vllm.scheduler.blocks.block_tables import BlockTables
from blendhub.vllm.scheduler.request.blocks import Tables

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request


class EngineBlocks:
    """The blocks as vLLM's manager knows them. Asked by the scheduler's thread."""

    manager: "KVCacheManager"
    """vLLM gives it before the first request."""

    def __init__(self, tables: BlockTables) -> None:
        self.tables = tables

    def of(self, request: str) -> Tables:
        """The blocks of a running request in each block table, in the order of its tokens."""
        return self.manager.get_block_ids(request)

    @property
    def pool(self) -> "BlockPool":
        return self.manager.block_pool

    @property
    def hash_block_size(self) -> int:
        """The number of tokens that each block hash stands for."""
        return self.manager.block_pool.hash_block_size

    def cached_blocks(self, hashes: Sequence[BlockHash], most: int) -> Sequence[Sequence[KVCacheBlock]]:
        """The blocks that vLLM's prefix cache has under these hashes, for each block table."""
        return self.manager.coordinator.find_longest_cache_hit(list(hashes), most)[0]

    def cached_block(self, table: int, block_hash: BlockHash) -> KVCacheBlock | None:
        """The block that vLLM's prefix cache has under this hash for a block table."""
        found = self.pool.get_cached_block(block_hash, [table])
        return found[0] if found else None

    def holding(self, request: str, span: Span) -> Iterator[int]:
        """The blocks of these tokens of a running request, in all block tables."""
        for manager in self.manager.coordinator.single_type_managers:
            first, end = span.start // manager.block_size, -(-span.end // manager.block_size)
            yield from (block.block_id for block in manager.req_to_blocks[request][first:end])

    def states(self, request: "Request", end: int) -> dict[int, int]:
        """The block with the state behind the first ``end`` tokens, for each table of recurrent layers; empty if vLLM's
        prefix cache has none: it may have been evicted. What the step under way computes is there already."""
        found, reached, *_ = self.manager.coordinator.find_longest_cache_hit(list(request.block_hashes), end)
        return {table: found[table][-1].block_id for table in self.tables.of_states} if reached == end else {}

    def cache_anew(self, request: "Request", tables: Tables, start: int, end: int) -> None:
        """Have vLLM's prefix cache hold the blocks of ``[start, end)`` under the hashes that the request has now.

        ``tables`` may have blocks that vLLM has freed, and that are held.
        """
        pool = self.pool
        if not pool.enable_caching:
            return
        for manager, table in zip(self.manager.coordinator.single_type_managers, tables, strict=True):
            name, size = request.request_id, manager.block_size
            blocks, first = [pool.blocks[number] for number in table], start // size
            # vLLM has cached what the steps under way will fill, too.
            n_full = max(end // size, manager.num_cached_block.get(name, 0))
            for block in blocks[first:n_full]:
                if not block.is_null:
                    pool._maybe_evict_cached_block(block)
            pool.cache_full_blocks(request, blocks, first, n_full, size, manager.kv_cache_group_id)
            manager.num_cached_block[name] = n_full

    def cached_tokens(self, hashes: Sequence[BlockHash], most: int) -> int:
        """How many tokens, up to ``most``, vLLM's prefix cache has under these hashes."""
        return self.manager.coordinator.find_longest_cache_hit(list(hashes), most)[1]
