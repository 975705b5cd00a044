"""The requests that are being blended: how much a step recomputes, and which later requests wait for them."""

import math
import time
from collections.abc import Mapping
from typing import NamedTuple

from vllm.v1.request import Request

from blendhub.vllm.scheduler.request_state import RequestState

SPARE_STEPS = 2
"""Steps added for the copy, and for a scheduler that plans a step before it knows the result of the last one."""
MIN_BLEND_SHARE = 0.25
"""The share of vLLM's token budget that a step may recompute even if vLLM left less: a request that is blended comes to
its end beside others, and their streams wait for a step by a quarter longer at most."""
LEAST_S = 0.1
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

    def __init__(self, engine_tokens: int, requests: Mapping[str, RequestState]) -> None:
        """``engine_tokens``: vLLM's token budget of a step. ``requests``: those of the engine, now and later."""
        self._engine_tokens = engine_tokens
        self._least = math.ceil(MIN_BLEND_SHARE * engine_tokens)
        self._requests = requests
        self._step = 0
        self._begun: int | None = None
        """The tokens that vLLM has yet to compute of the prompts that it has begun; None: not counted in this step.

        They are counted once a step: many requests may wait, and be decided on.
        """
        self._blending: dict[str, BlendTurn] = {}

    def next_step(self) -> None:
        self._step += 1
        self._begun = None

    def scheduled(self, state: RequestState) -> None:
        """Note that vLLM has begun the prompt of a request."""
        if self._begun is not None:
            self._begun += state.left_to_engine

    def budget(self, scheduled: int) -> int:
        """How many tokens may be recomputed in a step in which vLLM computes ``scheduled`` tokens."""
        return max(self._engine_tokens - scheduled, self._least)

    def begin(self, request: Request, n_tokens: int) -> None:
        """Note that a request is loaded, and that so many of its tokens are recomputed."""
        before = sum(other.n_tokens for other in self._blending.values())
        last_step = self._step + SPARE_STEPS + -(-(before + n_tokens) // self.budget(self._engine_tokens))
        self._blending[request.request_id] = BlendTurn(request, n_tokens, last_step, time.monotonic() + LEAST_S)

    def end(self, request: Request) -> None:
        """Note that the request is loaded, or has ended."""
        self._blending.pop(request.request_id, None)

    def must_wait(self, request: Request, n_tokens: int) -> bool:
        """Whether a request must wait for which vLLM would compute ``n_tokens`` tokens."""
        if self._waiting() + n_tokens <= self._engine_tokens:
            return False  # vLLM computes it in one step
        now = time.monotonic()
        return any(
            other.request < request and (self._step <= other.last_step or now <= other.until)
            for other in self._blending.values()
        )

    def _waiting(self) -> int:
        if self._begun is None:
            self._begun = sum(state.left_to_engine for state in self._requests.values())
        return self._begun
