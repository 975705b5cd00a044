"""Keeps requests in the order of their arrival, where vLLM computes some prompts and others are blended."""

import time
from typing import NamedTuple

from vllm.v1.request import Request

from blendhub.vllm.scheduler.step_budget import Pace

SPARE_STEPS = 2
"""Steps added for the copy, and for a scheduler that plans a step before it knows the result of the last one."""
LEAST_S = 0.1
"""The least seconds to wait: steps of an idle engine take no time, but the copy does."""


class Blending(NamedTuple):
    request: Request
    n_tokens: int
    """The number of tokens to recompute."""
    last_step: int
    until: float
    """The step, and the time, up to which later requests wait for this one."""


class Turns:
    """Makes later requests wait for a request that is being blended.

    vLLM computes the prompts that it has begun before all others, also before one whose KV has been loaded since.

    So a request that came later, and whose prompt takes vLLM several steps, would overtake one that is being blended.
    It waits instead: for as many steps as recomputation should take, however many that takes in the end.
    """

    def __init__(self, engine_tokens: int) -> None:
        """``engine_tokens``: vLLM's token budget of a step."""
        self._engine_tokens = engine_tokens
        self._step = 0
        self._blending: dict[str, Blending] = {}

    def next_step(self) -> None:
        self._step += 1

    def begin(self, request: Request, n_tokens: int, pace: Pace) -> None:
        """Note that a request is loaded, and that so many of its tokens are recomputed."""
        before = sum(other.n_tokens for other in self._blending.values())
        last_step = self._step + SPARE_STEPS + pace.steps_to_recompute(before + n_tokens)
        self._blending[request.request_id] = Blending(request, n_tokens, last_step, time.monotonic() + LEAST_S)

    def end(self, request: Request) -> None:
        """Note that the request is loaded, or has ended."""
        self._blending.pop(request.request_id, None)

    def must_wait(self, request: Request, n_tokens: int, begun: int) -> bool:
        """Whether a request of ``n_tokens`` must wait, where ``begun`` tokens of begun prompts are left."""
        if begun + n_tokens <= self._engine_tokens:
            return False  # vLLM computes it in one step
        now = time.monotonic()
        return any(
            other.request < request and (self._step <= other.last_step or now <= other.until)
            for other in self._blending.values()
        )
