"""What is known of the saves of one request."""

import time

from blendhub.vllm.scheduler.blocks.prefix_cache import Tables
from blendhub.vllm.scheduler.request_state import RequestState
from blendhub.vllm.scheduler.save_plan import SavePlan


class RequestSaves:
    """The saves of one request."""

    def __init__(self, request: RequestState) -> None:
        self.request = request
        self.begun_in = 0
        """The step that computed the request's first tokens."""
        self.plan: SavePlan | None = None
        self.retired: list[SavePlan] = []
        """Earlier plans. The workers finish the saves of these plans; no more saves are scheduled."""
        self.reached = 0
        """The number of tokens that the last step had computed."""
        self.states: SavePlan | None = None
        """The states of recurrent layers to store."""
        self.due_state = 0
        """The number of tokens behind which a state is to be stored as soon as they are known; 0: none is."""
        self.is_dropped = False
        """Whether the cache was reset, so that nothing that is computed for this request is stored any more."""

        self.has_answer = False
        """Whether its answer is planned, too."""
        self.since = time.monotonic()
        """When it was asked for first."""
        self.since_planned = 0.0
        """When the first of its tokens was planned to be saved."""
        self.planned_tokens = 0

    def planned(self, tokens: int) -> None:
        """Note that a step saves so many of its tokens."""
        self.since_planned = self.since_planned or time.monotonic()
        self.planned_tokens += tokens

    def retire(self) -> None:
        self.retired += self.plans
        self.plan = self.states = None

    @property
    def are_over(self) -> bool:
        """Whether nothing of the request is left to store when it ends, so that its blocks are not needed."""
        return not self.begun_in or (self.plan is None and (self.is_dropped or not self.request.lacks_adapter))

    @property
    def plans(self) -> list[SavePlan]:
        return [plan for plan in (self.plan, self.states) if plan]

    def end(self, computed: int, tables: Tables, ranks: int) -> None:
        """The request has ended: from now on its KV up to ``computed`` is stored, from these blocks."""
        self.computed = computed
        self.tables = tables
        self.uncommitted_ranks = ranks
        self.ended_at = time.monotonic()
