"""Whether chosen tokens attend by the device or by the engine's attention: both are measured on the loaded model."""

import logging
import math
import time
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from blendhub.contracts import Device
from blendhub.core.errors import Unsupported
from blendhub.core.spans import Span
from blendhub.vllm.model.engine_model import EngineModel, GroupAttention
from blendhub.vllm.model.layer_groups import LayerGroup, attention_of
from blendhub.vllm.model.page_trial import error_of
from blendhub.vllm.model.recompute_set import RecomputeSet, RequestTokens
from blendhub.vllm.worker.ranks import Ranks

log = logging.getLogger(__name__)
PROMPT_TOKENS, COMPUTED_TOKENS, CHOSEN_TOKENS, LENGTHS = 32_768, 4096, 2048, (1, 4, 32, 256)
"""The most tokens of the prompt in which the ways are compared, those of them that are computed before, those of a
forward, and how long its spans are."""
SECONDS = 2.0
"""How long it may take. Shorter spans are measured first, the shortest in any case."""
RUNS = 3
"""How often a forward runs to be timed, of which the fastest counts: the first may allocate memory, and compile."""


def choose_attention(
    model: EngineModel, device: Device, groups: Sequence[LayerGroup], allowed: float, ranks: Ranks
) -> None:
    """Have the model's forwards attend by the device, if that has attention and is right, where it is faster.

    ``allowed``: how far hidden states may be off, relative to the largest. Writes to any pages, so it must be called
    before the first request.
    """
    if type(device).attention is Device.attention:  # no line for what the device never does
        return
    try:
        attention = ranks.together(lambda: attention_of(device, groups, model))
        if not attention:
            return
        times = _measured(model, attention, allowed, ranks)
    except Exception as error:
        log.warning("chosen tokens attend by the engine's attention, not by the device: %s", error)
        return
    ours, theirs = zip(*times, strict=True)
    if longest := longest_attended(ours, theirs):
        model.attention, model.attended_length = attention, longest
    log.info(
        "chosen tokens attend by %s: in spans of %s tokens they take %s ms by the device, and %s ms by the engine%s",
        _named(longest),
        ", ".join(map(str, LENGTHS[: len(times)])),
        *(", ".join(f"{1000 * seconds:.1f}" for seconds in way) for way in (ours, theirs)),
        "" if len(times) == len(LENGTHS) else f"; to measure longer spans would take more than {SECONDS:g} s",
    )


def longest_attended(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The longest spans for which the device is faster than the engine, as for all shorter ones; 0: for none.

    The seconds are those of the first lengths. Spans that are longer than all that were measured are the engine's.
    """
    faster = [*map(is_faster, ours, theirs), False]
    return math.inf if faster.index(False) == len(LENGTHS) else (0, *LENGTHS)[faster.index(False)]


def _named(longest: float) -> str:
    if longest == math.inf:
        return "the device"
    return f"the device in spans of up to {longest} tokens" if longest else "the engine's attention"


def is_faster(ours: float, theirs: float) -> bool:
    return ours < theirs


def _measured(
    model: EngineModel, attention: Sequence[GroupAttention], allowed: float, ranks: Ranks
) -> list[tuple[float, float]]:
    """The seconds of forwards over the first of the lengths: by the device, and by the engine's attention."""
    times: list[tuple[float, float]] = []
    started, spent, last = time.perf_counter(), 0.0, 0.0
    for chosen in ranks.together(partial(_forwards, model)):
        # All ranks know the same times, so they stop at the same length.
        if times and spent + last > SECONDS:
            break
        begun = time.perf_counter()
        pair = ranks.together(partial(_compared, model, attention, chosen, allowed))
        now = time.perf_counter()
        ours, theirs, last, spent = ranks.largest(torch.tensor([*pair, now - begun, now - started])).tolist()
        times.append((ours, theirs))
    return times


def _compared(
    model: EngineModel, attention: Sequence[GroupAttention], chosen: RecomputeSet, allowed: float
) -> tuple[float, float]:
    """The seconds by the device, and by the engine's attention. Raises Unsupported if the device's result is wrong.

    Both compute the same tokens over the same pages.
    """
    expected, theirs = _run(model, chosen)
    model.attention = attention
    try:
        hidden, ours = _run(model, chosen)
    finally:
        model.attention = ()
    # Behind what was computed, pages hold anything, and take as long to read.
    known = torch.from_numpy(chosen.positions < min(COMPUTED_TOKENS, model.max_tokens))
    if (error := error_of(hidden[known], expected[known])) > allowed:
        raise Unsupported(f"what the model computes with it is off by {error:.1%} (allowed {allowed:.1%})")
    return ours, theirs


def _forwards(model: EngineModel) -> Sequence[RecomputeSet]:
    """The beginning of a prompt is computed, and then some of the prompt's tokens, in spans of each length."""
    longest = min(model.config.model_config.max_model_len, PROMPT_TOKENS)
    # Block tables share the memory of their blocks.
    n_tables = len(model.block_sizes)
    tables = [np.arange(1 + table, model.n_blocks, n_tables) for table in range(n_tables)]
    n = min(longest, *(len(blocks) * size for blocks, size in zip(tables, model.block_sizes, strict=True)))
    part = RequestTokens(
        np.arange(n, dtype=np.uint32) % 97, tables, [Span(0, min(n, COMPUTED_TOKENS, model.max_tokens))]
    )
    model.forward(RecomputeSet([part]))
    forwards, n_chosen = [], max(1, min(CHOSEN_TOKENS, model.max_tokens, n // 4))
    for length in LENGTHS:
        length = min(length, n_chosen)
        starts = np.linspace(0, n - length, min(n_chosen // length, model.max_spans), dtype=np.int64).tolist()
        forwards.append(RecomputeSet([part._replace(spans=[Span(start, start + length) for start in starts])]))
    return forwards


def _run(model: EngineModel, chosen: RecomputeSet) -> tuple[torch.Tensor, float]:
    """The hidden states, and the seconds of the fastest run."""
    seconds = []
    for _ in range(RUNS):
        started = time.perf_counter()
        # Copying waits for the device.
        hidden = model.forward(chosen).cpu()
        seconds.append(time.perf_counter() - started)
    return hidden, min(seconds)
