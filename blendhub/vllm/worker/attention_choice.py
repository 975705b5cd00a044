"""Whether chosen tokens attend by the device or by the engine's attention: both are measured on the loaded model."""

import logging
import math
import time
from collections.abc import Sequence

import numpy as np
import torch

from blendhub.contracts import ChosenAttention, Device
from blendhub.core.errors import Unsupported
from blendhub.core.spans import Span
from blendhub.vllm.model.chosen import Chosen, Part
from blendhub.vllm.model.engine_model import EngineModel
from blendhub.vllm.model.page_trial import error_of
from blendhub.vllm.worker.ranks import Ranks

log = logging.getLogger(__name__)
PROMPT_TOKENS, CHOSEN_TOKENS, LENGTHS = 4096, 256, (1, 4, 32, 256)
"""The most tokens of the prompt in which the ways are compared, those of a forward, and how long its spans are."""
RUNS = 2
"""How often a forward runs to be timed: the first run may allocate memory, and compile."""


def choose_attention(model: EngineModel, device: Device, allowed: float, ranks: Ranks) -> None:
    """Have the model's forwards attend by the device, if that has attention and is right, where it is faster.

    ``allowed``: how far hidden states may be off, relative to the largest. Writes to any pages, so it must be called
    before the first request.
    """
    try:
        attention = ranks.together(lambda: device.attention(model.rules(), model.dtype))
        if attention is None:
            return
        times = ranks.largest(ranks.together(lambda: _measured(model, attention, allowed)))
    except Exception as error:
        log.warning("chosen tokens attend by the engine's attention, not by the device: %s", error)
        return
    if longest := longest_attended(times.tolist()):
        model.attention, model.attended_length = attention, longest
    ours, theirs = (", ".join(f"{1000 * seconds:.1f}" for seconds in way) for way in times.tolist())
    log.info(
        "chosen tokens attend by %s: in spans of %s tokens they take %s ms by the device, and %s ms by the engine",
        _named(longest),
        ", ".join(map(str, LENGTHS)),
        ours,
        theirs,
    )


def longest_attended(times: Sequence[Sequence[float]]) -> float:
    """The longest spans for which the device is faster than the engine, as for all shorter ones; 0: for none."""
    faster = [is_faster(ours, theirs) for ours, theirs in zip(*times, strict=True)]
    return math.inf if all(faster) else (0, *LENGTHS)[faster.index(False)]


def _named(longest: float) -> str:
    if longest == math.inf:
        return "the device"
    return f"the device in spans of up to {longest} tokens" if longest else "the engine's attention"


def is_faster(ours: float, theirs: float) -> bool:
    return ours < theirs


def _measured(model: EngineModel, attention: ChosenAttention, allowed: float) -> torch.Tensor:
    """The seconds of each forward: by the device, and by the engine's attention. Raises Unsupported for wrong results.

    The pages hold what the engine's attention has computed, whatever of it is computed again.
    """
    forwards = _forwards(model)
    theirs = [_run(model, chosen) for chosen in forwards]
    model.attention = attention
    try:
        ours = [_run(model, chosen) for chosen in forwards]
    finally:
        model.attention = None
    for (mine, _), (expected, _) in zip(ours, theirs, strict=True):
        if (error := error_of(mine, expected)) > allowed:
            raise Unsupported(f"what the model computes with it is off by {error:.1%} (allowed {allowed:.1%})")
    return torch.tensor([[seconds for _, seconds in way] for way in (ours, theirs)])


def _forwards(model: EngineModel) -> Sequence[Chosen]:
    """A prompt is computed, and then some of its tokens again, in spans of each length."""
    longest = min(model.max_tokens, model.config.model_config.max_model_len, PROMPT_TOKENS)
    blocks = np.arange(1, model.n_blocks)
    n = min(longest, len(blocks) * model.block_size)
    part = Part(np.arange(n, dtype=np.uint32) % 97, [blocks], [Span(0, n)])
    model.forward(Chosen([part]))
    forwards, wanted = [], max(1, min(CHOSEN_TOKENS, n // 4))
    for length in LENGTHS:
        length = min(length, wanted)
        starts = np.linspace(0, n - length, min(wanted // length, model.max_spans), dtype=np.int64).tolist()
        forwards.append(Chosen([part._replace(spans=[Span(start, start + length) for start in starts])]))
    return forwards


def _run(model: EngineModel, chosen: Chosen) -> tuple[torch.Tensor, float]:
    """The hidden states, and the seconds of the last run."""
    for _ in range(RUNS):
        started = time.perf_counter()
        # Copying waits for the device.
        hidden = model.forward(chosen).cpu()
        seconds = time.perf_counter() - started
    return hidden, seconds
