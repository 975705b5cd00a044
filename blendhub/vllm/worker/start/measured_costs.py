"""What prefill, loads, probes and recomputation cost: measured at the worker's start on the loaded model."""

import logging
import math
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from blendhub.contracts import Segment
from blendhub.core.errors import Unsupported
from blendhub.core.layout import shard_bytes_of
from blendhub.core.spans import Match, Span
from blendhub.vllm.costs import Cost, Costs
from blendhub.vllm.decision import Decision
from blendhub.vllm.messages import LoadJob, LoadSource
from blendhub.vllm.model.recompute_set import RecomputeSet, RequestTokens
from blendhub.vllm.model.states.state_path import StatePath
from blendhub.vllm.worker.forwards import Forwards
from blendhub.vllm.worker.layer_copies import LayerCopies
from blendhub.vllm.worker.recompute import Blend, BlendContext

log = logging.getLogger(__name__)
LENGTHS = (16, 64, 256, 1024, 4096)
"""The lengths of the prompts: the shortest shows what the least work takes, and the longest how attention grows. Where
the last ones do not fit into a step, the longest that fits takes their place."""
FEWEST_LENGTHS = 3
QUESTION, SHARE, RUNS = 16, 0.3, 3
"""The tokens behind a prompt that ask, the share that is recomputed, and how often each prompt is measured. The first
run may allocate memory, and compile."""
SECONDS = 3.0
"""How long the prompts of a length may take, if a token takes as long as in those of the length before."""


class Seconds(NamedTuple):
    """What a prompt took."""

    prefill: float
    probe: float
    recompute: float
    load: float


def measure_costs(context: BlendContext) -> Costs | None:
    """Measure what work costs on the slowest rank. All ranks return the same costs, or None with a line in the log if
    they cannot be measured.

    Writes to any pages, and pins memory of its own in place of an arena, so it must be called before the first request.
    """
    ranks, measured = context.ranks, dict[int, Seconds]()
    try:
        prompts = ranks.together(lambda: _Prompts(context))
        lengths = [*(n for n in LENGTHS if 3 * n <= 2 * prompts.longest), prompts.longest]
        if len(lengths) < FEWEST_LENGTHS:
            raise Unsupported(f"prompts of {prompts.longest} tokens at most fit; max_num_batched_tokens is a limit")
        for n, longer in pairwise([*lengths, prompts.longest]):
            runs = [ranks.together(partial(prompts.measured, n)) for _ in range(RUNS)]
            best = [min(times) for times in zip(*runs, strict=True)]
            slowest = ranks.largest(torch.tensor(best)).tolist()
            measured[n] = Seconds(*slowest)
            # All ranks know the same times, so they stop at the same length. What is compiled in first runs is no loss.
            if RUNS * sum(slowest) * longer / n > SECONDS:
                break
        if len(measured) < FEWEST_LENGTHS:
            raise Unsupported(f"{FEWEST_LENGTHS} lengths of prompts take more than {SECONDS:g} s")
    except Exception as error:
        log.warning("reuse is not compared with prefill by time, because their times cannot be measured: %s", error)
        return None
    longest, taken = max(measured), measured[max(measured)]
    log.info(
        "measured on %d tokens: prefill takes %.1f ms; loading %.1f ms, choosing tokens %.1f ms, recomputing %.0f%% of "
        "them %.1f ms",
        longest, *(1000 * taken.prefill, 1000 * taken.load, 1000 * taken.probe, 100 * SHARE, 1000 * taken.recompute),
    )  # fmt: skip
    prefill, probe, recompute, load = (
        list(zip(measured, seconds, strict=True)) for seconds in zip(*measured.values(), strict=True)
    )
    return Costs(
        prefill=Cost.fitted(prefill),
        probe=Cost.fitted(probe),
        recompute=Cost.fitted(recompute, SHARE),
        load=Cost.fitted(load),
        engine_tokens=context.model.max_tokens,
        token_bytes=shard_bytes_of([group.layout for group in context.groups]) / context.groups[0].layout.chunk_tokens,
    )


class _Prompts:
    """Prompts of any tokens, in any pages."""

    def __init__(self, context: BlendContext) -> None:
        self._context, model = context, context.model
        blocks, block_size = np.arange(1, model.n_blocks), min(model.block_sizes)
        longest = min(model.max_tokens, model.config.model_config.max_model_len, len(blocks) * block_size)
        self.longest = min(LENGTHS[-1], longest - QUESTION)
        # Block tables share the memory of their blocks, which does not matter here.
        self._tables = [blocks[: (self.longest + QUESTION) // block_size + 1]] * len(model.block_sizes)
        for table in {table for table, _ in model.recurrent.values()}:
            self._tables[table] = blocks[:1]
        self._copies = LayerCopies(context.device, context.groups)
        self._chunk_tokens = context.groups[0].layout.chunk_tokens
        # Every chunk is loaded from the same place.
        n_bytes = max(group.at + group.layout.shard_bytes for group in context.groups)
        context.device.pin(np.zeros(n_bytes, np.uint8))

    def measured(self, n: int) -> Seconds:
        """The seconds of a prompt of ``n`` tokens and a question."""
        model, tokens = self._context.model, np.arange(n + QUESTION, dtype=np.uint32) % 97
        prompt = RecomputeSet([RequestTokens(tokens, self._tables, [Span(0, n)], StatePath(0, n))])
        attention, model.attention = model.attention, ()
        try:
            prefill = self._timed(lambda: model.forward(prompt))
        finally:
            model.attention = attention
        chunks = (Span(at, min(at + self._chunk_tokens, n)) for at in range(0, n, self._chunk_tokens))
        pieces = [Segment(chunk, 0, 0, 0) for chunk in chunks]
        load = self._timed(lambda: self._copies.load(pieces, self._tables, 0).all.wait())
        moved = Decision(0, n, (Match(Span(0, n), 0, 0, False),), SHARE)
        if model.recurrent:  # chosen tokens are holes
            moved = Decision(0, n, (Match(Span(math.ceil(SHARE * n), n), 0, 0, False),), 0.0)
        blend = Blend(self._context, LoadJob("", tokens, tuple(self._tables), moved, LoadSource(0, 0, ())))
        both = self._timed(lambda: self._blend(blend))
        probe = blend.result.probe_seconds if blend.result else 0.0
        return Seconds(prefill, probe, both - probe, load)

    def _timed(self, work: Callable[[], object]) -> float:
        started = time.perf_counter()
        work()
        torch.get_device_module(self._context.model.device).synchronize()
        return time.perf_counter() - started

    def _blend(self, blend: Blend) -> None:
        forwards = Forwards(self._context)
        while not blend.result:
            forwards.step([blend], self._context.model.max_tokens)
            if blend.error:
                raise blend.error
