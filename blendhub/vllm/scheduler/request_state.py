"""The scheduler's state of one request, from its arrival to its end."""

from enum import Enum, auto
from typing import Any

import msgspec
import numpy as np
from vllm.v1.request import Request

from blendhub.hookspecs import AuditOutcome
from blendhub.layout import Variant
from blendhub.plan import Match
from blendhub.tokens import Tokens
from blendhub.vllm.decision import Decision, Refusal
from blendhub.vllm.messages import LoadResult
from blendhub.vllm.scheduler.lookup import Lookup
from blendhub.vllm.settings import Mode
from blendhub.vllm.spans import total
from blendhub.wire import Found


class Stage(Enum):
    """How far the reuse of stored KV has come. ``RequestState`` alone changes it."""

    LOOKING_UP = auto()
    """The hub has not answered the lookup yet."""
    FOUND = auto()
    """The hub has answered; vLLM has not allocated blocks yet."""
    LOADING = auto()
    """The workers load and recompute."""
    LOADED = auto()
    COMPUTING = auto()
    """vLLM computes what it lacks: reuse was refused, or the load failed."""


class Terms(msgspec.Struct, frozen=True):
    """What the engine's settings and the request's own parameters allow. Fixed when the request arrives."""

    variant: Variant
    mode: Mode
    ratio: float | None
    """The share of moved text that is recomputed; None: the engine's."""
    stores: bool
    explains: bool = False
    audit: bool = False
    """Whether the request asks for an audit."""


class RequestState:
    """One request of the engine.

    ::

        LOOKING_UP --answered--> FOUND --begin_load--> LOADING --end_load--> LOADED or COMPUTING

    ``look_up`` begins anew, unless the request is loading; ``refuse`` ends in COMPUTING from wherever it is called.
    """

    def __init__(self, request: Request, terms: Terms) -> None:
        self.request = request
        self.terms = terms
        self.stage = Stage.COMPUTING
        self.lookup: Lookup | None = None
        """Present while its lease is needed: until the load has ended."""
        self.found: Found | None = None
        """The answer to the last lookup. It outlives the lease: what is stored need not be stored again."""
        self.decision: Decision | None = None
        """What is being loaded, or was loaded."""
        self.result: LoadResult | None = None
        self.refusal: Refusal | None = None
        """Why nothing is reused."""
        self.is_sample = False
        """Whether its audit stands for all requests: whether the engine chose it, and not its client."""
        self.audit: AuditOutcome | None = None
        """The outcome. No request is audited twice."""
        self.engine_tokens = 0
        """The length of vLLM's own cached prefix when the request was scheduled last."""
        self._approximate_before: int | None = None
        """``first_approximate`` of earlier loads: a preempted request may keep blended blocks."""
        self._prompt = np.asarray(request.prompt_token_ids or (), np.uint32)

    # Transitions.

    def look_up(self, lookup: Lookup) -> None:
        assert self.stage is not Stage.LOADING
        self._approximate_before = self.first_approximate
        self.end_lookup()
        self.found = self.decision = self.result = None
        self.lookup, self.stage = lookup, Stage.LOOKING_UP

    def answered(self, found: Found) -> None:
        assert self.stage is Stage.LOOKING_UP
        self.found, self.stage = found, Stage.FOUND

    def decided(self, decision: Decision) -> None:
        """May be called again: vLLM asks in each step until it can allocate."""
        assert self.stage is Stage.FOUND
        self.decision = decision

    def begin_load(self) -> None:
        assert self.stage is Stage.FOUND and self.decision
        self.stage = Stage.LOADING

    def end_load(self, result: LoadResult) -> None:
        assert self.stage is Stage.LOADING
        self.result = result
        self.audit = self.audit or result.audit
        self.stage = Stage.COMPUTING if result.error else Stage.LOADED
        self.end_lookup()

    def refuse(self, refusal: Refusal) -> None:
        assert self.stage is not Stage.LOADING
        self._approximate_before = self.first_approximate
        self.refusal, self.stage = refusal, Stage.COMPUTING
        self.end_lookup()

    def end_lookup(self) -> None:
        """End the lease that the lookup brought, or still brings."""
        lookup, self.lookup = self.lookup, None
        if lookup:
            lookup.close()

    # What follows from it.

    @property
    def id(self) -> str:
        return self.request.request_id

    @property
    def matches(self) -> tuple[Match, ...]:
        """What the last lookup found, and may be loaded."""
        return self.found.matches if self.found else ()

    @property
    def first_approximate(self) -> int | None:
        """The position from which on KV differs from what the model alone computes; None if it differs nowhere."""
        firsts = [self._approximate_before]
        if self.decision and self.stage in (Stage.LOADING, Stage.LOADED):
            firsts.append(self.decision.first_approximate)
        return min((first for first in firsts if first is not None), default=None)

    @property
    def has_begun_to_answer(self) -> bool:
        """Whether tokens were generated before it was preempted."""
        return len(self.request.output_token_ids) > 0

    def tokens(self) -> Tokens:
        """The prompt, and the tokens generated until now."""
        answer = self.request.output_token_ids
        return np.concatenate([self._prompt, np.asarray(answer, np.uint32)]) if len(answer) else self._prompt

    def report(self) -> dict[str, Any]:
        """For the response: how many of the prompt's tokens were reused and recomputed, or why none were."""
        report: dict[str, Any] = {"engine_tokens": self.engine_tokens, "exact_tokens": 0, "moved_tokens": 0}
        report |= {"recomputed_tokens": 0, "hole_tokens": 0}
        if self.decision and self.result and not self.result.error:
            report["exact_tokens"] = total(self.decision.exact)
            report["moved_tokens"] = total(self.decision.moved)
            report["recomputed_tokens"] = total(self.result.recomputed)
            report["hole_tokens"] = self.result.holes
            if self.terms.explains:
                report["spans"] = {
                    "exact": msgspec.to_builtins(self.decision.exact),
                    "moved": msgspec.to_builtins(self.decision.moved),
                    "recomputed": msgspec.to_builtins(list(self.result.recomputed)),
                    "holes": msgspec.to_builtins(self.decision.holes),
                }
        elif self.result:
            report["reason"] = self.result.error
        elif self.refusal:
            report["reason"] = self.refusal.reason
        if self.audit:
            report["audit"] = msgspec.to_builtins(self.audit)
        return report
