"""Requests that are taken to the end of their recomputation, as a worker's steps do it."""

from collections.abc import Sequence

from blendhub.vllm.worker.forwards import Forwards
from blendhub.vllm.worker.recompute import Blend, BlendContext


def to_the_end(context: BlendContext, blends: Sequence[Blend], budget: int = 4096) -> list[int]:
    """The cost of each step."""
    forwards, costs = Forwards(context), []
    while any(blend.result is None and blend.error is None for blend in blends):
        costs.append(forwards.step(blends, budget))
        assert len(costs) < 10_000
    return costs
