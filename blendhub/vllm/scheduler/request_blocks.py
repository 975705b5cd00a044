"""The blocks of running requests, which saves read from, and the contents of vLLM's prefix cache."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.core.sched.output import SchedulerOutput

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager


class RequestBlocks:
    """The blocks as vLLM's manager knows them, or, of a vLLM that connectors cannot ask, as the scheduler's calls tell.

    Called by the scheduler's thread. What is followed misses blocks that vLLM takes back from a running request: it
    does that with models whose every layer has an attention window, which are refused (see ``model_check``).
    """

    def __init__(self) -> None:
        self._manager: KVCacheManager | None = None
        self._followed: dict[str, list[int]] = {}
        """The blocks by request; empty if there is a manager."""

    def ask(self, manager: "KVCacheManager") -> None:
        """Ask this manager from now on. Called before the first request, if ever."""
        self._manager = manager

    def of(self, request: str) -> list[int]:
        """The blocks of a running request, in the order of its tokens."""
        return self._manager.get_block_ids(request)[0] if self._manager else self._followed[request]

    def cached_tokens(self, hashes: Sequence[BlockHash], most: int) -> int | None:
        """How many tokens vLLM's prefix cache has under these hashes, at most so many; None: that cannot be asked."""
        return self._manager.coordinator.find_longest_cache_hit(list(hashes), most)[1] if self._manager else None

    def allocated(self, request: str, blocks: list[int]) -> None:
        """Note that vLLM has allocated blocks to a request that waited: these are all its blocks."""
        if not self._manager:
            self._followed[request] = list(blocks)

    def scheduled(self, step: SchedulerOutput) -> None:
        """Note that vLLM has scheduled a step. Running requests may have got further blocks for it."""
        if self._manager:
            return
        cached = step.scheduled_cached_reqs
        for request, groups in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if groups is None:
                continue
            if request in cached.resumed_req_ids:
                self._followed[request] = list(groups[0])
            else:
                self._followed[request] += groups[0]

    def ended(self, request: str) -> None:
        """Note that the request needs its blocks no more."""
        self._followed.pop(request, None)
