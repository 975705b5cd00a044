"""vLLM's CUDA graphs of the pieces between attention, which small forwards of BlendHub's own replay.

A graph reads its inputs where they were when it was captured: in buffers of the runner, in which those of a step may
stand already. Attention is between the pieces, and is looked up when it runs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from vllm.config import CUDAGraphMode, VllmConfig

from blendhub.core.errors import Unsupported

STATE = "DefaultModelState"
"""The kind of vLLM's model state that gives a model nothing but tokens and their positions."""


class Inputs(NamedTuple):
    """What a model is called with, with room behind the tokens if graphs are replayed."""

    ids: torch.Tensor
    positions: torch.Tensor
    is_padding: torch.Tensor | None = None
    """Which of them are no tokens; None: no graph is replayed."""


class Graphs:
    """The graphs of one worker's model runner V2."""

    def __init__(self, runner: Any, config: VllmConfig) -> None:
        """Raises Unsupported if forwards cannot replay any."""
        if why := _why_not(runner, config):
            raise Unsupported(why)
        self._manager = runner.cudagraph_manager
        self._buffers: tuple[torch.Tensor, ...] = (
            runner.input_buffers.input_ids,
            runner.input_buffers.positions,
            runner.input_buffers.is_padding,
        )
        self.most = max((n for n in config.compilation_config.cudagraph_capture_sizes or () if self.size(n)), default=0)
        """The most tokens of a forward that replays graphs."""
        if not self.most:
            raise Unsupported("vLLM has captured none of pieces between attention")

    def size(self, n: int) -> int | None:
        """How many tokens the graphs have that a forward over ``n`` replays; None: none have as many."""
        # As a batch with prompts in it, which replays no graph of whole steps.
        found = self._manager.dispatch(1, n, None, 0)
        return int(found.num_tokens) if found.cg_mode == CUDAGraphMode.PIECEWISE else None

    @contextmanager
    def inputs(self, ids: torch.Tensor, positions: torch.Tensor, size: int) -> Iterator[Inputs]:
        """These tokens where graphs of this size read them. Behind the context the buffers are as before."""
        n, own = len(ids), [buffer[:size] for buffer in self._buffers]
        before = [part.clone() for part in own]
        try:
            own[0][:n], own[1][:n], own[2][:n] = ids, positions, False
            own[0][n:], own[1][n:], own[2][n:] = 0, 0, True
            yield Inputs(*own)
        finally:
            for part, theirs in zip(own, before, strict=True):
                part.copy_(theirs)


def _why_not(runner: Any, config: VllmConfig) -> str:
    manager, state = getattr(runner, "cudagraph_manager", None), getattr(runner, "model_state", None)
    if manager is None or not hasattr(runner, "input_buffers"):
        return "vLLM's model runner V2 has them, and V1 serves this model"
    if not manager.cudagraph_mode.has_piecewise_cudagraphs():
        return f"cudagraph_mode is {manager.cudagraph_mode.name}"
    if manager.use_breakable_cg:
        return "vLLM breaks graphs of the whole model, and has none of pieces"
    if not config.compilation_config.splitting_ops_contain_kv_cache_update():
        return "the pieces write KV themselves"
    if config.parallel_config.data_parallel_size > 1:
        return "all ranks with data in parallel would have to"
    if config.lora_config:
        return "the pieces compute LoRA adapters"
    if config.speculative_config:
        return "a drafter computes tokens, too"
    if type(state).__name__ != STATE or getattr(state, "rope_state", None) or runner.supports_mm_inputs:
        return "the model takes more than tokens and positions"
    if config.model_config.enable_prompt_embeds:
        return "the model takes embeddings"
    return ""
