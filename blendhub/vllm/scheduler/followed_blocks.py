"""The blocks of running requests, for a vLLM that does not let connectors ask for them."""

from vllm.v1.core.sched.output import SchedulerOutput


class FollowedBlocks:
    """Put together from what vLLM's scheduler tells a connector. Called by the scheduler's thread.

    Blocks that vLLM takes back from a running request go unnoticed: it does that with models whose every layer has an
    attention window, which are refused (see ``model_check``).
    """

    def __init__(self) -> None:
        self._blocks: dict[str, list[int]] = {}

    def of(self, request: str) -> list[int]:
        """The blocks of a running request, in the order of its tokens."""
        return self._blocks[request]

    def allocated(self, request: str, blocks: list[int]) -> None:
        """vLLM has allocated blocks to a request that waited: these are all it has."""
        self._blocks[request] = list(blocks)

    def scheduled(self, step: SchedulerOutput) -> None:
        """vLLM has scheduled a step. Running requests may have got further blocks for it."""
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
