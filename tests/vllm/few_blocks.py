"""Has an engine's blocks be too few to blend a prompt of a model with windows."""

from typing import Any

from blendhub.vllm.scheduler.blocks import scratch


def lend(share: float) -> float:
    """Lend at most this share of an engine's blocks, in its process; the share that was lent before."""
    module: Any = scratch
    before: float = module.MOST_BORROWED
    module.MOST_BORROWED = share
    return before
