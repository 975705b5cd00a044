"""Which ranks hold the same KV, which is then stored once: those that a forward gives the same KV, to the bit.

All ranks do with a joint latent (MLA), and some where a model has fewer KV heads than ranks.
"""

from collections.abc import Sequence
from hashlib import blake2b

import torch

from blendhub.core.spans import Span
from blendhub.vllm.model.checks.parts_check import computed, trial_tokens
from blendhub.vllm.model.engine_model import EngineModel
from blendhub.vllm.model.pages import LayerPages
from blendhub.vllm.model.platform import keeps_latent


def digest_of_kv(model: EngineModel, layers: Sequence[LayerPages]) -> str:
    """A name for the KV of the trial tokens on this rank, in all layers."""
    kv = computed(model, layers, [Span(0, len(trial_tokens(model)))])
    rows = (rows.cpu().flatten().view(torch.uint8).numpy().tobytes() for pair in kv for rows in pair)
    return blake2b(b"".join(rows), digest_size=16).hexdigest()


def ranks_of_a_head(model: EngineModel, n_ranks: int) -> int:
    """On how many ranks vLLM has each head of KV."""
    latent = keeps_latent(model.layer(model.layer_names[0]))
    return n_ranks if latent else max(1, n_ranks // model.config.model_config.get_total_num_kv_heads())


def count_copies(kv: list[str], weights: list[str]) -> int:
    """How many neighbouring ranks hold the same KV, in groups of one size, by what all ranks have; 1: each has its own.

    Dummy weights tell nothing: vLLM draws the same on all ranks, and others may take their place.
    """
    size = kv.count(kv[0])
    groups = [kv[start : start + size] for start in range(0, len(kv), size)]
    are_even = all(group == group[:1] * size for group in groups)
    return size if are_even and len({*weights}) == len(weights) else 1
