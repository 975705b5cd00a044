"""The blocks of running requests, which saves read from, and the contents of vLLM's prefix cache."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.core.sched.output import SchedulerOutput

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager


class RequestBlocks(ABC):
    """The blocks of requests. Called by the scheduler's thread."""

    @abstractmethod
    def of(self, request: str) -> list[int]:
        """The blocks of a running request, in the order of its tokens."""

    @abstractmethod
    def cached_tokens(self, hashes: Sequence[BlockHash], most: int) -> int | None:
        """How many tokens vLLM's prefix cache has under these hashes, at most so many; None: that cannot be asked."""

    @abstractmethod
    def allocated(self, request: str, blocks: list[int]) -> None:
        """Note that vLLM has allocated blocks to a request that waited: these are all its blocks."""

    @abstractmethod
    def scheduled(self, step: SchedulerOutput) -> None:
        """Note that vLLM has scheduled a step. Running requests may have got further blocks for it."""

    @abstractmethod
    def ended(self, request: str) -> None:
        """Note that the request needs its blocks no more."""


class AskedBlocks(RequestBlocks):
    """The blocks as vLLM knows them: vLLM is asked each time."""

    def __init__(self, manager: "KVCacheManager") -> None:
        self._manager = manager

    def of(self, request: str) -> list[int]:
        return self._manager.get_block_ids(request)[0]

    def cached_tokens(self, hashes: Sequence[BlockHash], most: int) -> int | None:
        return self._manager.coordinator.find_longest_cache_hit(list(hashes), most)[1]

    def allocated(self, request: str, blocks: list[int]) -> None:
        """Do nothing: vLLM knows the blocks."""

    def scheduled(self, step: SchedulerOutput) -> None:
        """Do nothing: vLLM knows the blocks."""

    def ended(self, request: str) -> None:
        """Do nothing: vLLM knows the blocks."""


class FollowedBlocks(RequestBlocks):
    """The blocks as followed from the scheduler's calls, for a vLLM that connectors cannot ask.

    Blocks that vLLM takes back from a running request go unnoticed: it does that with models whose every layer has an
    attention window, which are refused (see ``model_check``).
    """

    def __init__(self) -> None:
        self._blocks: dict[str, list[int]] = {}

    def of(self, request: str) -> list[int]:
        return self._blocks[request]

    def cached_tokens(self, hashes: Sequence[BlockHash], most: int) -> int | None:
        return None

    def allocated(self, request: str, blocks: list[int]) -> None:
        self._blocks[request] = list(blocks)

    def scheduled(self, step: SchedulerOutput) -> None:
        cached = step.scheduled_cached_reqs
        for request, groups in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if groups is None:
                continue
            if request in cached.resumed_req_ids:
                self._blocks[request] = list(groups[0])
            else:
                self._blocks[request] += groups[0]

    def ended(self, request: str) -> None:
        self._blocks.pop(request, None)
