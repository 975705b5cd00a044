"""What of the requests is stored: the half of the scheduler's side that gives, as the other half takes."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue

import numpy as np
from vllm.v1.core.sched.output import SchedulerOutput

from blendhub.client import HubClient, Reservation
from blendhub.plan import Span
from blendhub.vllm.errands import Errands
from blendhub.vllm.messages import Save, StepPlan
from blendhub.vllm.saving import Saving
from blendhub.vllm.tracking import Tracked

BlockIds = Callable[[str], list[int]]


class Ending:
    """A request that has ended, whose blocks are kept until its KV is saved."""

    def __init__(self, tracked: Tracked, saving: Saving, computed: int, blocks: list[int]) -> None:
        self.tracked = tracked
        self.saving = saving
        self.computed = computed
        self.blocks = blocks
        self.is_announced = False
        """Whether a plan has named it: the workers answer each time they read a name, and vLLM takes one answer."""


class Storing:
    """Reserves room in the hub for what requests compute, and tells the workers when to write it."""

    def __init__(self, errands: Errands, block_size: int, min_saved_tokens: int) -> None:
        self.block_ids: BlockIds = lambda request: []
        self.refused: SimpleQueue[BaseException] = SimpleQueue()
        """Why room was refused. Filled by the thread that asks the hub."""
        self._errands = errands
        self._block_size = block_size
        self._min_saved_tokens = min_saved_tokens
        self._ending: dict[str, Ending] = {}

    def plan(self, step: SchedulerOutput, tracked: Mapping[str, Tracked], plan: StepPlan) -> None:
        """Add what this step computes of prompts, and what has ended."""
        self._save_what_is_computed(step, tracked, plan)
        self._save_what_has_ended(plan)

    def ended(self, tracked: Tracked, blocks: list[int]) -> bool:
        """Whether a request's blocks are needed for a while, now that it has ended."""
        if tracked.saving is None:
            return False
        # The last token was sampled, but nothing was computed from it.
        computed = min(tracked.request.num_computed_tokens, tracked.request.num_tokens - 1)
        tracked.saving.end(tracked.request.num_prompt_tokens, computed, tracked.first_approximate is None)
        self._ending[tracked.id] = Ending(tracked, tracked.saving, computed, blocks)
        return True

    def freed(self, requests: set[str]) -> None:
        """The workers need these requests' blocks no more."""
        for request in requests & set(self._ending):
            self.give_up(self._ending.pop(request).tracked)

    def give_up(self, tracked: Tracked) -> None:
        """Let go of what was reserved and will not be written; what is stored stays."""
        for right in tracked.saving.open_rights if tracked.saving else ():
            self._errands.quietly(tracked.namespace, partial(HubClient.abort, right=right))
        tracked.saving = None

    def _save_what_is_computed(self, step: SchedulerOutput, tracked: Mapping[str, Tracked], plan: StepPlan) -> None:
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
        for request, ending in self._ending.items():
            if ending.is_announced:
                continue
            # Asked before: the hub's answer may come at any moment, and what it says must not be missed.
            waits = ending.saving.waits
            self._save(ending.tracked, ending.saving, ending.computed, ending.blocks, plan)
            if not waits:
                plan.ending.add(request)
                ending.is_announced = True

    def _save(self, tracked: Tracked, saving: Saving, computed: int, blocks: list[int] | None, plan: StepPlan) -> None:
        for part in saving.parts:
            taken = part.take(computed)
            if taken is None:
                continue
            right, slots, span = taken
            if blocks is None:
                blocks = self.block_ids(tracked.id)
            needed = np.asarray(blocks[: -(-span.end // self._block_size)], np.int64)
            plan.saves.append(Save(tracked.id, tracked.space, right, slots, span, needed))
            plan.spaces[tracked.space] = tracked.namespace

    def _begin_saving(self, tracked: Tracked) -> Saving:
        blended = tracked.first_approximate is not None
        known = [match for match in tracked.matches if match.exact or blended]
        saving = Saving(partial(self._reserve, tracked), self._min_saved_tokens)
        saving.begin(tracked.request.num_prompt_tokens, known, tracked.first_approximate)
        return saving

    def _reserve(self, tracked: Tracked, span: Span, exact: bool, run: int | None) -> "Future[Reservation]":
        tokens = tracked.tokens()[: span.end]
        future = self._errands.run(tracked.namespace, lambda client: client.reserve(tokens, span, exact=exact, run=run))
        future.add_done_callback(self._note_reservation)
        return future

    def _note_reservation(self, future: "Future[Reservation]") -> None:
        """Called by the thread that asked; counters belong to the scheduler's."""
        error = future.exception()
        if error is not None:
            self.refused.put(error)
