"""Whether chosen tokens attend by the device or by the engine's attention: both are measured on the loaded model.

Where single tokens attend by the device, long spans still may by the engine, whose kernel is made for prefill.
"""

import logging
import time
from collections.abc import Sequence

import numpy as np
import torch

from blendhub.contracts import Device
from blendhub.core.errors import Unsupported
from blendhub.core.spans import Span
from blendhub.vllm.model.engine_model import EngineModel, GroupAttention
from blendhub.vllm.model.layer_groups import LayerGroup, attention_of
from blendhub.vllm.model.page_trial import error_of
from blendhub.vllm.model.recompute_set import RecomputeSet, RequestTokens
from blendhub.vllm.ranks import Ranks

log = logging.getLogger(__name__)
PROMPT_TOKENS, COMPUTED_TOKENS, CHOSEN_TOKENS = 32_768, 4096, 2048
"""The most tokens of the prompt in which the ways are compared, those of them that are computed before, and the chosen
ones, each of which stands alone."""
LONG_TOKENS = 256
"""From so many tokens on a span is long."""
RUNS = 3
"""How often a forward runs to be timed, of which the fastest counts: the first may allocate memory, and compile."""


def choose_attention(
    model: EngineModel, device: Device, groups: Sequence[LayerGroup], allowed: float, ranks: Ranks
) -> None:
    """Have the model's forwards attend by the device, if that has attention, and is right and faster.

    On an H100 the device took 51 ms for these tokens, and the engine 169.
    ``allowed``: how far hidden states may be off, relative to the largest. Writes to any pages, so it must be called
    before the first request.
    """
    if type(device).attention is Device.attention:  # no line for what the device never does
        return
    try:
        attention = ranks.together(lambda: attention_of(device, groups, model))
        if not attention:
            return
        prompt = ranks.together(lambda: _begun_prompt(model))
        chosen = _chosen_tokens(model, prompt, 1)
        seconds = ranks.together(lambda: _compared(model, attention, chosen, allowed))
        ours, theirs = ranks.largest(torch.tensor(seconds)).tolist()
    except Exception as error:
        log.warning("chosen tokens attend by the engine's attention, not by the device: %s", error)
        return
    if ours < theirs:
        model.attention = attention
    log.info(
        "chosen tokens attend by %s: %d of them take %.1f ms by the device, and %.1f ms by the engine",
        "the device" if model.attention else "the engine's attention",
        len(chosen), 1000 * ours, 1000 * theirs,
    )  # fmt: skip
    if model.attention and model.can_cut:
        _choose_for_long_spans(model, prompt, allowed, ranks)


def _choose_for_long_spans(model: EngineModel, prompt: RequestTokens, allowed: float, ranks: Ranks) -> None:
    try:
        chosen = _chosen_tokens(model, prompt, LONG_TOKENS)
        seconds = ranks.together(lambda: _compared_for_long_spans(model, chosen, allowed))
        ours, theirs = ranks.largest(torch.tensor(seconds)).tolist()
    except Exception as error:
        log.warning("long spans attend by the device, too, and not by the engine's attention: %s", error)
        return
    if theirs < ours:
        model.long_span = LONG_TOKENS
    log.info(
        "spans of %d tokens and more attend by %s: %d tokens of such take %.1f ms by the device, and %.1f ms by the "
        "engine",
        LONG_TOKENS, "the engine's attention" if model.long_span else "the device",
        len(chosen), 1000 * ours, 1000 * theirs,
    )  # fmt: skip


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
    _check_error(model, chosen, hidden, expected, allowed)
    return ours, theirs


def _compared_for_long_spans(model: EngineModel, chosen: RecomputeSet, allowed: float) -> tuple[float, float]:
    """The same, where spans are long."""
    expected, ours = _run(model, chosen)
    model.long_span = LONG_TOKENS
    try:
        hidden, theirs = _run(model, chosen)
    finally:
        model.long_span = None
    _check_error(model, chosen, hidden, expected, allowed)
    return ours, theirs


def _check_error(
    model: EngineModel, chosen: RecomputeSet, hidden: torch.Tensor, expected: torch.Tensor, allowed: float
) -> None:
    # Behind what was computed, pages hold anything, and take as long to read.
    known = torch.from_numpy(chosen.positions < min(COMPUTED_TOKENS, model.max_tokens))
    if (error := error_of(hidden[known], expected[known])) > allowed:
        raise Unsupported(f"what the model computes with it is off by {error:.1%} (allowed {allowed:.1%})")


def _begun_prompt(model: EngineModel) -> RequestTokens:
    """A prompt whose beginning is computed."""
    longest = min(model.config.model_config.max_model_len, PROMPT_TOKENS)
    # Block tables share the memory of their blocks.
    n_tables = len(model.block_sizes)
    tables = [np.arange(1 + table, model.n_blocks, n_tables) for table in range(n_tables)]
    n = min(longest, *(len(blocks) * size for blocks, size in zip(tables, model.block_sizes, strict=True)))
    beginning = Span(0, min(n, COMPUTED_TOKENS, model.max_tokens))
    part = RequestTokens(np.arange(n, dtype=np.uint32) % 97, tables, [beginning])
    model.forward(RecomputeSet([part]))
    return part


def _chosen_tokens(model: EngineModel, prompt: RequestTokens, length: int) -> RecomputeSet:
    """Spans of so many tokens in the prompt."""
    n = len(prompt.tokens)
    n_chosen = max(1, min(CHOSEN_TOKENS, model.max_tokens, model.max_spans, n // 4) // length)
    if min(n, model.max_tokens) < length:
        raise Unsupported(f"the model has no room for spans of {length} tokens")
    starts = np.linspace(0, n - length, n_chosen, dtype=np.int64).tolist()
    return RecomputeSet([prompt._replace(spans=[Span(start, start + length) for start in starts])])


def _run(model: EngineModel, chosen: RecomputeSet) -> tuple[torch.Tensor, float]:
    """The hidden states, and the seconds of the fastest run."""
    seconds = []
    for _ in range(RUNS):
        started = time.perf_counter()
        # Copying waits for the device.
        hidden = model.forward(chosen).cpu()
        seconds.append(time.perf_counter() - started)
    return hidden, min(seconds)
