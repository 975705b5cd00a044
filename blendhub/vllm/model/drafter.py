"""vLLM's drafter, where it is a model whose layers keep KV: what it takes to compute that KV for chosen tokens."""

from typing import Any

import torch
from vllm.config import VllmConfig

from blendhub.core.errors import Unsupported

HEADS = ("EagleProposer", "EagleSpeculator", "MTPSpeculator")
"""Heads on the model's hidden states (EAGLE, EAGLE3, MTP), of either runner. For a token they get the one behind it."""
MODELS = ("DraftModelProposer", "StandaloneARSpeculator")
"""Models that get the same tokens as the served one."""


class Drafter:
    """``proposer`` is that of the model runner. Raises Unsupported for one whose KV is computed in another way."""

    def __init__(self, proposer: Any, module: torch.nn.Module, config: VllmConfig) -> None:
        speculation: Any = config.speculative_config
        name = type(proposer).__name__
        is_other = name not in HEADS + MODELS or hasattr(module, "get_mtp_target_hidden_states")
        if is_other or speculation.parallel_drafting or getattr(speculation, "use_heterogeneous_vocab", False):
            raise Unsupported(
                f"text is not moved, because BlendHub cannot compute the KV of vLLM's drafter (method "
                f"{speculation.method!r}, {name}) for chosen tokens"
            )
        self._proposer = proposer
        self._looks_ahead = name in HEADS
        self.uses_mrope = bool(getattr(proposer, "uses_mrope", False))

    def forward(self, ids: torch.Tensor, ids_behind: torch.Tensor, positions: torch.Tensor, computed: Any) -> None:
        """Compute tokens as the drafter's first pass over a prompt does, which writes their KV.

        ``computed`` is what the model returned for them.
        """
        model, inputs = self._proposer.model, dict[str, Any]()
        tokens = ids_behind if self._looks_ahead else ids
        if self._looks_ahead:
            hidden, of_layers = computed if isinstance(computed, tuple) else (computed, None)
            inputs["hidden_states"] = model.combine_hidden_states(torch.cat(of_layers, -1)) if of_layers else hidden
        takes_embeddings = self._proposer.supports_mm_inputs
        inputs["inputs_embeds"] = model.embed_input_ids(tokens) if takes_embeddings else None
        model(input_ids=None if takes_embeddings else tokens, positions=positions, **inputs)
