"""What of the requests is stored: the half of the scheduler's side that gives, as the other half takes."""

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue

import numpy as np
from vllm.v1.core.sched.output import SchedulerOutput

from blendhub.client import HubClient, Reservation
from blendhub.errors import BlendHubError, DeadlineExceeded
from blendhub.plan import Span
from blendhub.vllm.hub_executor import HubExecutor
from blendhub.vllm.messages import Save, StepPlan
from blendhub.vllm.scheduler.request_state import RequestState
from blendhub.vllm.scheduler.save_plan import SavePlan
from blendhub.vllm.settings import Settings

BlockIds = Callable[[str], list[int]]
NO_BLOCK = 0
"""vLLM has it in the place of blocks that it took away because the attention's window has left them."""


class Ending:
    """A request that has ended, and is not saved yet."""

    def __init__(self, tracked: RequestState, saving: SavePlan, computed: int, blocks: list[int], ranks: int) -> None:
        self.tracked = tracked
        self.saving = saving
        self.computed = computed
        self.blocks = blocks
        self.ended_at = time.monotonic()
        self.unsettled_ranks = ranks


class SaveScheduler:
    """Reserves room in the hub for what requests compute, and tells the workers when to write it."""

    def __init__(self, executor: HubExecutor, block_size: int, settings: Settings, ranks: int) -> None:
        self.block_ids: BlockIds = lambda request: []
        self.refused: SimpleQueue[BaseException] = SimpleQueue()
        """Why room was refused. Filled by the thread that asks the hub, too."""
        self._executor = executor
        self._block_size = block_size
        self._min_saved_tokens = settings.policy.min_saved_tokens
        self._patience_s = settings.lookup_timeout_s
        self._ranks = ranks
        self._ending: dict[str, Ending] = {}
        """Their blocks are kept for saves that no plan has named yet."""
        self._announced: dict[str, Ending] = {}
        """A plan has said that no save follows; the workers have yet to commit."""

    @property
    def is_busy(self) -> bool:
        """Whether workers have yet to say that nothing is left to be committed."""
        return bool(self._ending or self._announced)

    def plan(self, step: SchedulerOutput, tracked: Mapping[str, RequestState], plan: StepPlan) -> None:
        """Add what this step computes of prompts, and what has ended."""
        self._save_what_is_computed(step, tracked, plan)
        self._save_what_has_ended(plan)

    def ended(self, tracked: RequestState, blocks: list[int]) -> bool:
        """Whether a request's blocks are needed for a while, now that it has ended."""
        if tracked.saving is None:
            self.abandon(tracked)
            return False
        # The last token was sampled, but nothing was computed from it; what is being computed now was not sampled yet.
        computed = min(tracked.request.num_computed_tokens, tracked.request.num_tokens - 1)
        tracked.saving.end(tracked.request.num_prompt_tokens, computed, tracked.first_approximate is None)
        self._ending[tracked.id] = Ending(tracked, tracked.saving, computed, blocks, self._ranks)
        return True

    def settled(self, requests: Mapping[str, int]) -> None:
        """So many more ranks have nothing left to commit of these requests."""
        for request, ranks in requests.items():
            ending = self._announced[request]
            ending.unsettled_ranks -= ranks
            if not ending.unsettled_ranks:
                self.abandon(self._announced.pop(request).tracked)

    def retire(self, tracked: RequestState) -> None:
        """Store no more of what is being stored of a request. What the workers are saving of it is stored all the
        same, so that its rights end with the request."""
        if tracked.saving:
            tracked.retired.append(tracked.saving)
            tracked.saving = None

    def abandon(self, tracked: RequestState) -> None:
        """The same, and end its rights; what is stored stays."""
        self.retire(tracked)
        savings, tracked.retired = tracked.retired, []
        if any(saving.parts for saving in savings):
            # On the thread that reserved: it knows by then what the hub has answered.
            self._executor.run(tracked.namespace, partial(_abort, savings))

    def drop(self, running: Iterable[RequestState]) -> None:
        """Store nothing of what was computed up to now, not even what the workers are saving."""
        for tracked in [*running, *(ending.tracked for ending in [*self._ending.values(), *self._announced.values()])]:
            tracked.stores = False
            for saving in [*tracked.retired, *([tracked.saving] if tracked.saving else [])]:
                saving.drop()
            self.abandon(tracked)

    def _save_what_is_computed(
        self, step: SchedulerOutput, tracked: Mapping[str, RequestState], plan: StepPlan
    ) -> None:
        computed = {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
        cached = step.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request, before in computed.items():
            one = tracked.get(request)
            if one is None:
                continue
            if one.saving is None and one.stores:
                one.saving = self._begin_saving(one)
            if one.saving:
                upto = min(before + step.num_scheduled_tokens[request], one.request.num_prompt_tokens)
                self._save(one, one.saving, upto, None, plan)

    def _save_what_has_ended(self, plan: StepPlan) -> None:
        for request, ending in list(self._ending.items()):
            # Asked before: the hub's answer may come at any moment, and what it says must not be missed.
            waits = ending.saving.waits
            self._save(ending.tracked, ending.saving, ending.computed, ending.blocks, plan)
            if waits and time.monotonic() < ending.ended_at + self._patience_s:
                continue
            if waits:
                self.refused.put(
                    DeadlineExceeded(f"the hub gave no room within lookup_timeout_s {self._patience_s} of the end")
                )
            plan.ending.add(request)
            self._announced[request] = self._ending.pop(request)

    def _save(
        self, tracked: RequestState, saving: SavePlan, computed: int, blocks: list[int] | None, plan: StepPlan
    ) -> None:
        for part in saving.parts:
            taken = part.take(computed)
            if taken is None:
                continue
            right, slots, span = taken
            if blocks is None:
                blocks = self.block_ids(tracked.id)
            needed = np.asarray(blocks[: -(-span.end // self._block_size)], np.int64)
            if NO_BLOCK in needed[span.start // self._block_size :]:
                part.drop()
                self.refused.put(DeadlineExceeded("vLLM had taken blocks away when the hub gave room for their KV"))
                continue
            plan.saves.append(Save(tracked.id, tracked.space, right, slots, span, needed))
            plan.spaces[tracked.space] = tracked.namespace

    def _begin_saving(self, tracked: RequestState) -> SavePlan:
        blended = tracked.first_approximate is not None
        known = [match for match in tracked.matches if match.exact or blended]
        saving = SavePlan(partial(self._reserve, tracked), self._min_saved_tokens)
        saving.begin(tracked.request.num_prompt_tokens, known, tracked.first_approximate)
        return saving

    def _reserve(self, tracked: RequestState, span: Span, exact: bool, run: int | None) -> "Future[Reservation]":
        tokens = tracked.tokens()[: span.end]
        future = self._executor.run(
            tracked.namespace, lambda client: client.reserve(tokens, span, exact=exact, run=run)
        )
        future.add_done_callback(self._note_reservation)
        return future

    def _note_reservation(self, future: "Future[Reservation]") -> None:
        """Called by the thread that asked; counters belong to the scheduler's."""
        error = future.exception()
        if error is not None:
            self.refused.put(error)


def _abort(savings: list[SavePlan], client: HubClient) -> None:
    for saving in savings:
        for right in saving.open_rights:
            with contextlib.suppress(BlendHubError):
                client.abort(right)
