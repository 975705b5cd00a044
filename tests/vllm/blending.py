"""Requests that are taken to the end of their recomputation, as a worker's steps do it."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from blendhub.core.tokens import Tokens
from blendhub.vllm.decision import Decision
from blendhub.vllm.messages import AuditedAnswer, LoadJob, LoadSource
from blendhub.vllm.worker.forwards import Forwards
from blendhub.vllm.worker.recompute import Blend, BlendContext

ONE_TOKEN = AuditedAnswer()


def load_job(
    request: str,
    tokens: Tokens,
    tables: tuple[npt.NDArray[np.int64], ...],
    decision: Decision,
    answer: AuditedAnswer = ONE_TOKEN,
) -> LoadJob:
    """A load whose KV is there already."""
    return LoadJob(request, tokens, tables, decision, LoadSource(0, 0, ()), answer=answer)


def to_the_end(context: BlendContext, blends: Sequence[Blend], budget: int = 4096) -> list[int]:
    """The cost of each step."""
    forwards, costs = Forwards(context), []
    while any(blend.result is None and blend.error is None for blend in blends):
        costs.append(forwards.step(blends, budget))
        assert len(costs) < 10_000
    return costs
