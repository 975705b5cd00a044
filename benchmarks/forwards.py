"""Times of BlendHub's own forwards in an engine."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from blendhub import Span

Seconds = list[tuple[float, float]]
"""For each round, the seconds until the host was done, and until the device was."""


def forward_seconds(engine: Any, context: int, *ways: Sequence[Span], rounds: int = 10) -> list[Seconds]:
    """How long forwards over these tokens of a prompt take, for each way to choose them. The ways take turns."""
    engine.one([10, 11, 12])
    taken: list[Seconds] = engine.call("inside", "benchmarks.forwards:timed", context, ways, rounds)
    return taken


def timed(context: int, ways: Sequence[Sequence[Span]], rounds: int) -> list[Seconds]:
    """Runs in the engine, which has served a request."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from blendhub.vllm.model.recompute_set import RecomputeSet, RequestTokens

    connector: Any = get_kv_transfer_group()
    model = connector._worker._context.model
    tokens = np.full(context, 10, np.uint32)
    # Block 0 is vLLM's own; what the others hold is of no request, and is forgotten with the engine.
    blocks = np.arange(1, context // model.block_size + 1)

    def once(spans: Sequence[Span]) -> tuple[float, float]:
        _synchronize()
        started = time.perf_counter()
        for first in range(0, len(spans), model.max_spans):
            model.forward(RecomputeSet([RequestTokens(tokens, [blocks], spans[first : first + model.max_spans])]))
        host = time.perf_counter() - started
        _synchronize()
        return host, time.perf_counter() - started

    for spans in ways:  # the first compiles
        once(spans)
    in_turn = [[once(spans) for spans in ways] for _ in range(rounds)]
    return [list(way) for way in zip(*in_turn, strict=True)]


def _synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
