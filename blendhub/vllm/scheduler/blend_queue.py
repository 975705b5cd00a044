"""The requests that are being blended: how much a step recomputes, and which later requests wait for them."""

import math
import time
from typing import NamedTuple

from vllm.v1.request import Request

from blendhub.vllm.scheduler.request.served_request import Requests, ServedRequest

SPARE_STEPS = 2
"""Steps added for the copy, and for a scheduler that plans a step before it knows the result of the last one."""
MIN_BLEND_SHARE = 0.25
"""The share of vLLM's token budget that a step may recompute even if vLLM left less: a request that is blended comes to
its end beside others, and their streams wait for a step by a quarter longer at most."""
MIN_WAIT_S = 0.1
"""The least seconds to wait: steps of an idle engine take no time, but the copy does."""


class BlendTurn(NamedTuple):
    """A request that is being blended."""

    request: Request
    n_tokens: int
    """The number of tokens to recompute."""
    last_step: int
    until: float
    """The step, and the time, up to which later requests wait for this one."""


class BlendQueue:
    """Makes later requests wait for a request that is being blended.

    vLLM computes the prompts that it has begun before all others, also before one whose KV has been loaded since.

    So a request that came later, and whose prompt takes vLLM several steps, would overtake one that is being blended.
    It waits instead: for as many steps as recomputation takes beside prompts that fill them, and no longer.
    """

    def __init__(self, engine_tokens: int, requests: Requests) -> None:
        """``engine_tokens``: vLLM's token budget of a step."""
        self._engine_tokens = engine_tokens
        self._min_tokens = math.ceil(MIN_BLEND_SHARE * engine_tokens)
        self._requests = requests
        self._step = 0
        self._begun_tokens: int | None = None
        """The tokens that vLLM has yet to compute of the prompts that it has begun; None: not counted in this step.

        They are counted once a step: many requests may wait, and be decided on.
        """
        self._blending: list[BlendTurn] = []

    def next_step(self) -> None:
        self._step += 1
        self._begun_tokens = None

    def allocated(self, request: ServedRequest) -> None:
        """vLLM has begun the prompt of a request."""
        if self._begun_tokens is not None:
            self._begun_tokens += request.left_to_engine

    def budget(self, scheduled: int) -> int:
        """How many tokens may be recomputed in a step in which vLLM computes ``scheduled`` tokens."""
        return max(self._engine_tokens - scheduled, self._min_tokens)

    def begin(self, request: Request, n_tokens: int) -> None:
        """A request is loaded, and so many of its tokens are recomputed."""
        before = sum(turn.n_tokens for turn in self._blending)
        last_step = self._step + SPARE_STEPS + -(-(before + n_tokens) // self.budget(self._engine_tokens))
        self._blending.append(BlendTurn(request, n_tokens, last_step, time.monotonic() + MIN_WAIT_S))

    def end(self, request: Request) -> None:
        """The request is loaded, or has ended."""
        self._blending = [turn for turn in self._blending if turn.request is not request]

    def must_wait(self, request: Request, n_tokens: int) -> bool:
        """Whether a request must wait for which vLLM would compute ``n_tokens`` tokens."""
        if not self._blending or self._begun() + n_tokens <= self._engine_tokens:
            return False  # vLLM computes it in one step
        now = time.monotonic()
        return any(
            turn.request < request and (self._step <= turn.last_step or now <= turn.until) for turn in self._blending
        )

    def _begun(self) -> int:
        if self._begun_tokens is None:
            self._begun_tokens = sum(request.left_to_engine for request in self._requests.known.values())
        return self._begun_tokens
