"""The stored KV that one request reuses: what was found, what was decided, and what became of the load."""

from enum import Enum, auto

from blendhub.client.answer import Answer
from blendhub.client.wire import Found
from blendhub.core.spans import Match, total
from blendhub.vllm.decision import Choice, Decision, Refusal
from blendhub.vllm.messages import LoadResult
from blendhub.vllm.spans import overlaps


class Stage(Enum):
    """How far the reuse of stored KV has come."""

    LOOKING_UP = auto()
    """The hub has not answered the lookup yet."""
    FOUND = auto()
    """The hub has answered; vLLM has not allocated blocks yet."""
    LOADING = auto()
    """The workers load and recompute."""
    LOADED = auto()
    COMPUTING = auto()
    """vLLM computes what it lacks: reuse was refused, or the load failed."""


class Reuse:
    """::

        LOOKING_UP --answered--> FOUND --begin_load--> LOADING --end_load--> LOADED or COMPUTING

    ``look_up`` begins anew, unless the request is loading; ``refuse`` ends in COMPUTING from wherever it is called.
    """

    def __init__(self) -> None:
        self.stage = Stage.COMPUTING
        self.lookup: Answer[Found] | None = None
        """Its lease is held until the workers have released it, or the request needs it no more."""
        self.found: Found | None = None
        """The answer to the last lookup. It outlives the lease: what is stored need not be stored again."""
        self.choice: Choice | None = None
        """The part of ``found`` that is being loaded, or was loaded, and why it is no more."""
        self.result: LoadResult | None = None
        self.refusal: Refusal | None = None
        """Why nothing is reused."""
        self.copied_tokens = 0
        """How many of the tokens that are loaded, or were, come from vLLM's own blocks."""
        self.had_its_turn = False
        """Whether vLLM has asked for the request."""

    # Transitions.

    def look_up(self, lookup: Answer[Found] | None) -> None:
        """The hub is asked, or will be when the request has its turn."""
        assert self.stage is not Stage.LOADING
        self.end_lookup()
        self.found = self.choice = self.result = None
        self.lookup, self.stage = lookup, Stage.LOOKING_UP

    def answered(self, found: Found) -> None:
        assert self.stage is Stage.LOOKING_UP
        self.found, self.stage = found, Stage.FOUND

    def decided(self, choice: Choice) -> None:
        """Keep a choice. May be called again: vLLM asks in each step until it can allocate."""
        assert self.stage is Stage.FOUND
        self.choice = choice

    def begin_load(self) -> Answer[Found]:
        """Returns the lookup, under whose lease the workers load."""
        assert self.stage is Stage.FOUND and self.decision and self.lookup
        self.stage, self.copied_tokens = Stage.LOADING, 0
        return self.lookup

    def end_load(self, result: LoadResult) -> None:
        """The workers have released the lease, if the load did not fail."""
        assert self.stage is Stage.LOADING
        self.result = result
        self.stage = Stage.COMPUTING if result.error else Stage.LOADED
        if result.error:
            self.end_lookup()  # it may have ended
        self.lookup = None

    def refuse(self, refusal: Refusal) -> None:
        assert self.stage is not Stage.LOADING
        self.refusal, self.stage = refusal, Stage.COMPUTING
        self.end_lookup()

    def end_lookup(self) -> None:
        """End the lease that the lookup brought, or still brings."""
        lookup, self.lookup = self.lookup, None
        if lookup:
            lookup.close()

    # What follows from it.

    @property
    def decision(self) -> Decision | None:
        """The decision about what is being loaded, or was loaded."""
        return self.choice.decision if self.choice else None

    @property
    def loaded(self) -> Decision | None:
        """The decision about what was loaded."""
        return self.decision if self.stage is Stage.LOADED else None

    @property
    def fetched_tokens(self) -> int:
        """How many of the tokens that are loaded, or were, the hub had to read from its store."""
        if not (self.found and self.decision):
            return 0
        spans = [match.span for match in self.decision.sources]
        fetched = total(span for _, _, span in overlaps(spans, self.found.fetched))
        return min(fetched, total(spans) - self.copied_tokens)

    @property
    def matches(self) -> tuple[Match, ...]:
        """The matches of the last lookup, which may be loaded."""
        return self.found.matches if self.found else ()
