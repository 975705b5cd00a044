"""Requests that are taken to the end of their recomputation, as a worker's steps do it."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from blendhub import PluginHost
from blendhub.core.tokens import Tokens
from blendhub.vllm.decision import Decision
from blendhub.vllm.messages import LoadJob, LoadSource
from blendhub.vllm.model.layer_groups import layer_groups, pages_of
from blendhub.vllm.ranks import Ranks
from blendhub.vllm.worker.forwards import Forwards
from blendhub.vllm.worker.recompute import Blend, BlendContext
from tests.stand_in import StandIn
from tests.vllm.two_ranks import ALONE

HOST = PluginHost.discover()


def context_of(model: Any, selector: Any = "first_k", ranks: Ranks = ALONE, device: Any = None) -> Any:
    """What the blends of a worker with this model share; ``selector`` is one, or the name of one."""
    groups = layer_groups(model, 32)
    selector = HOST.create("selector", selector, {}) if isinstance(selector, str) else selector
    device = device or StandIn(block_tokens=1, overlaps_compute=True)
    return BlendContext(model, pages_of(model, groups), groups, device, selector, ranks)


def load_job(tokens: Tokens, decision: Decision, first_block: int = 0, name: str = "r") -> LoadJob:
    """A load whose KV is there already, in blocks of 16 tokens from this one on."""
    blocks = np.arange(first_block, first_block - (-len(tokens) // 16))
    return LoadJob(name, tokens, (blocks,), decision, LoadSource(0, 0, ()))


def to_the_end(context: BlendContext, blends: Sequence[Blend], budget: int = 4096) -> list[int]:
    """The cost of each step."""
    forwards, costs = Forwards(context), []
    while any(blend.result is None and blend.error is None for blend in blends):
        costs.append(forwards.step(blends, budget))
        assert len(costs) < 10_000
    return costs
