"""What the scheduler's side remembers of a request."""

from enum import Enum, auto
from typing import Any

import msgspec
import numpy as np
from vllm.v1.request import Request

from blendhub.layout import Namespace
from blendhub.plan import Match, join
from blendhub.tokens import Tokens
from blendhub.vllm.decision import Decision, Refusal
from blendhub.vllm.messages import LoadResult
from blendhub.vllm.scheduler.lookup import Lookup
from blendhub.vllm.scheduler.save_plan import SavePlan
from blendhub.vllm.settings import Mode
from blendhub.vllm.spans import total
from blendhub.wire import Found


class Stage(Enum):
    """How far a request has come."""

    ASKED = auto()
    """The hub is to say what is stored."""
    FOUND = auto()
    """It has said so, and vLLM is to make room."""
    LOADING = auto()
    LOADED = auto()
    COMPUTED = auto()
    """vLLM computes what it does not have: reuse was refused, or has failed."""


class RequestState:
    """One request of the engine, from its arrival to its end."""

    def __init__(
        self,
        request: Request,
        namespace: Namespace,
        mode: Mode,
        ratio: float,
        refusal: Refusal | None,
        stores: bool,
        explains: bool = False,
    ) -> None:
        self.request = request
        self.namespace = namespace
        self.space = namespace.digest
        self.mode = mode
        self.ratio = ratio
        self.stores = stores
        self.explains = explains
        self.refusal = refusal
        """Why nothing is reused; None while that is open, and if something is."""
        self.stage = Stage.COMPUTED if refusal else Stage.ASKED
        self.lookup: Lookup | None = None
        self.found: Found | None = None
        self.decision: Decision | None = None
        """What is being loaded, or was."""
        self.outcome: LoadResult | None = None
        self.engine_tokens = 0
        """What vLLM's own cache held when the request was admitted."""
        self.first_approximate: int | None = None
        self.was_approximate_from: int | None = None
        """The same before the load that is under way."""
        self.saving: SavePlan | None = None
        """What of it is being stored."""
        self.retired: list[SavePlan] = []
        """What was being stored, and is not gone on with."""
        self._prompt = np.asarray(request.prompt_token_ids or (), np.uint32)

    @property
    def id(self) -> str:
        return self.request.request_id

    @property
    def matches(self) -> list[Match]:
        """What was found and may be loaded: the pieces under the lease, as matches again."""
        pieces = self.found.pieces if self.found else ()
        return join(Match(piece.span, piece.run, piece.source_start, piece.exact) for piece in pieces)

    def tokens(self) -> Tokens:
        """The prompt, and what was generated up to now."""
        answer = self.request.output_token_ids
        return np.concatenate([self._prompt, np.asarray(answer, np.uint32)]) if len(answer) else self._prompt

    def report(self) -> dict[str, Any]:
        """For the response: what became of the prompt's tokens."""
        told: dict[str, Any] = {"engine_tokens": self.engine_tokens, "exact_tokens": 0, "moved_tokens": 0}
        told |= {"recomputed_tokens": 0, "hole_tokens": 0}
        if self.decision and self.outcome and not self.outcome.error:
            told["exact_tokens"] = total(self.decision.exact)
            told["moved_tokens"] = total(self.decision.moved)
            told["recomputed_tokens"] = total(self.outcome.recomputed)
            told["hole_tokens"] = self.outcome.holes
            if self.explains:
                told["spans"] = {
                    "exact": msgspec.to_builtins(self.decision.exact),
                    "moved": msgspec.to_builtins(self.decision.moved),
                    "recomputed": msgspec.to_builtins(list(self.outcome.recomputed)),
                    "holes": msgspec.to_builtins(self.decision.holes),
                }
        elif self.outcome:
            told["reason"] = self.outcome.error
        elif self.refusal:
            told["reason"] = self.refusal.reason
        return told
