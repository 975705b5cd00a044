"""The connector in vLLM's scheduler: asks the hub, decides, and tells the workers what to do.

Nothing here waits for the hub but ``matched``, and that for a moment only.
"""

import logging
import time
from collections import Counter
from typing import Any

import msgspec
import numpy as np
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from blendhub.errors import BlendHubError
from blendhub.hookspecs import RequestReport
from blendhub.host import PluginHost
from blendhub.observers import Observers
from blendhub.vllm.decision import Refusal, decide
from blendhub.vllm.hub_executor import HubExecutor
from blendhub.vllm.messages import Address, HubPlace, Load, StepPlan, WorkerReport
from blendhub.vllm.scheduler.admission import Admission
from blendhub.vllm.scheduler.lookup import Lookup
from blendhub.vllm.scheduler.request_state import RequestState, Stage
from blendhub.vllm.scheduler.salt_block_hashes import can_salt, salt_block_hashes
from blendhub.vllm.scheduler.save_scheduler import SaveScheduler
from blendhub.vllm.scheduler.startup import Facts, Watch
from blendhub.vllm.sessions import Sessions
from blendhub.vllm.settings import Settings
from blendhub.vllm.spans import total

log = logging.getLogger(__name__)


class ConnectorScheduler:
    """All methods are called by the scheduler's thread."""

    def __init__(
        self,
        config: VllmConfig,
        settings: Settings,
        admission: Admission,
        address: Address,
        engine_id: str,
        host: PluginHost,
        facts: Facts,
        observers: Observers,
    ) -> None:
        self.counters: Counter[str] = Counter()
        self._observers = observers
        self._config = config
        self._settings = settings
        self._admission = admission
        self._place: HubPlace | None = HubPlace(address, admission.namespace)
        """For the workers, who have yet to hear of it."""
        self.executor = HubExecutor(Sessions(address, engine_id, -1, host), admission.namespace)
        self.storing = SaveScheduler(
            self.executor, config.cache_config.block_size, settings, admission.namespace.world_size
        )
        self._tracked: dict[str, RequestState] = {}
        self._unsent: list[RequestState] = []
        """Their lookups wait for a session to be opened."""
        self._patience_s = settings.lookup_wait_ms / 1000
        self._loads: list[tuple[Load, RequestState]] = []
        self._cancelled: set[str] = set()
        self._told: set[str] = set()
        """Refusals that were logged: each code once is enough."""
        try:
            self.executor.reach()
        except BlendHubError:
            self.executor.close()
            raise
        self._watch = Watch(facts, lambda: self.executor.home)
        self._watch.refusal()

    # A request arrives, and is admitted.

    def arrived(self, request: Request) -> None:
        """A new request: ask the hub about it at once, long before its turn comes."""
        tracked = self._admission.admit(request, self._watch.refusal())
        self._tracked[request.request_id] = tracked
        if tracked.refusal:
            self._count_refusal(tracked, tracked.refusal)
        else:
            self._ask(tracked)

    def matched(self, request: Request, local: int) -> tuple[int | None, bool]:
        """How many tokens after the first ``local`` will be there; None: ask again later."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return 0, False
        tracked.engine_tokens = local
        if request.skip_reading_prefix_cache and not tracked.refusal:
            self._refuse(
                tracked, Refusal("all_computed", "the request needs every token computed, as prompt logprobs do")
            )
        if tracked.stage is Stage.COMPUTED:
            return 0, False
        # It was preempted, and lost what was loaded; or its turn came late, and what was found is no longer leased.
        if tracked.stage is Stage.LOADED or (tracked.lookup and tracked.lookup.has_expired):
            self._ask(tracked)
        try:
            if tracked.stage is Stage.ASKED and not self._answered(tracked):
                return None, False
        except BlendHubError as error:
            self._refuse(tracked, Refusal("hub_failed", f"{type(error).__name__}: {error}"))
            return 0, False
        return self._decide(tracked, local)

    def allocated(self, request: Request, blocks: list[int], n_external: int) -> None:
        """vLLM has made room for what ``matched`` promised."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or not n_external or tracked.decision is None:
            return
        decision = tracked.decision
        tracked.stage = Stage.LOADING
        tracked.was_approximate_from = tracked.first_approximate
        tokens = tracked.tokens()[: decision.end]
        self._loads.append((Load(tracked.id, tracked.space, tokens, np.asarray(blocks, np.int64), decision), tracked))
        if decision.first_approximate is not None:
            self._becomes_approximate(tracked, decision.first_approximate)
            size = self._config.cache_config.hash_block_size or self._config.cache_config.block_size
            salt_block_hashes(request, decision.first_approximate, size)

    def _becomes_approximate(self, tracked: RequestState, first: int) -> None:
        """From here on, or from further ahead, KV is not what the model alone would compute."""
        known = tracked.first_approximate
        if known is None or first < known:
            tracked.first_approximate = first
            # If it was preempted, more of it was to be stored as exact.
            self.storing.retire(tracked)

    # A step.

    def plan(self, step: SchedulerOutput) -> StepPlan:
        """What the workers do in this step."""
        self._patience_s = self._settings.lookup_wait_ms / 1000
        self._send_lookups()
        plan = StepPlan(budget=self._budget(step))
        if self._place and self.executor.is_up:
            plan.hub, self._place = self._place, None
        for load, tracked in self._loads:
            plan.loads.append(load)
            plan.spaces[load.space] = tracked.namespace
        self._loads.clear()
        plan.cancelled, self._cancelled = self._cancelled, set()
        plan.preempted = set(step.preempted_req_ids or ())
        self.storing.plan(step, self._tracked, plan)
        while not self.storing.refused.empty():
            self._count_reservation(self.storing.refused.get())
        return plan

    def heard(self, report: WorkerReport) -> None:
        """What the workers have done."""
        self.counters["saved_tokens"] += report.saved_tokens
        for reason, count in report.failed_saves.items():
            self.counters[f"saves_failed_{reason}"] += count
        self.storing.settled(report.settled)
        for request, outcome in report.loads.items():
            tracked = self._tracked.get(request)
            if tracked is None or tracked.decision is None:
                continue
            tracked.stage = Stage.COMPUTED if outcome.error else Stage.LOADED
            tracked.outcome = outcome
            self._end_lookup(tracked)
            if outcome.error:
                self.counters["loads_failed"] += 1
                # vLLM computes what was not loaded. Of an earlier time blended blocks may be left all the same.
                tracked.first_approximate = tracked.was_approximate_from
                continue
            moved = tracked.decision.moved
            self.counters["requests_blended" if moved else "requests_exact"] += 1
            self.counters["tokens_exact"] += sum(map(len, tracked.decision.exact))
            self.counters["tokens_moved"] += sum(map(len, moved))
            self.counters["tokens_recomputed"] += total(outcome.recomputed)
            self.counters["tokens_in_holes"] += outcome.holes
            self.counters["blend_microseconds"] += round(outcome.seconds * 1e6)

    # A request ends.

    def ended(self, request: Request, blocks: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Whether its blocks are needed for a while, and what to tell whoever asked for it."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return False, None
        report = tracked.report()
        told = {"blendhub": report}
        facts = {"request": tracked.id, "prompt_tokens": request.num_prompt_tokens, **report}
        self._observers.request_done(msgspec.convert(facts, RequestReport))
        if log.isEnabledFor(logging.DEBUG):
            # Streams and batches of many clients have no other way to see it.
            log.debug("%s", msgspec.json.encode({"request": tracked.id, **told}).decode())
        self._end_lookup(tracked)
        if tracked.stage is Stage.LOADING:
            # vLLM keeps the blocks until the workers say that they have stopped.
            self._cancelled.add(tracked.id)
            self.storing.abandon(tracked)
            return False, told
        return self.storing.ended(tracked, blocks), told

    @property
    def has_work(self) -> bool:
        """Whether steps are needed even if no request is left."""
        return self.storing.is_busy

    def clear(self) -> bool:
        """Have all forgotten that is stored in this engine's namespaces; returns whether the hub is there to do it.

        What was found before is not used, and what is being stored is not stored.
        """
        self.storing.drop(tracked for tracked in self._tracked.values() if tracked.saving)
        self.executor.clear()
        for tracked in self._tracked.values():
            if tracked.stage in (Stage.ASKED, Stage.FOUND):
                self._ask(tracked)
        return self.executor.is_up

    def close(self) -> None:
        self.executor.close()

    # Asking the hub.

    def _ask(self, tracked: RequestState) -> None:
        self._end_lookup(tracked)
        tracked.outcome = tracked.decision = tracked.found = None
        tracked.stage = Stage.ASKED
        tracked.lookup = Lookup(self.executor, tracked.namespace, tracked.tokens(), self._settings.lookup_timeout_s)
        if not tracked.lookup.is_sent:
            self._unsent.append(tracked)

    def _send_lookups(self) -> None:
        """A session may have been opened since; vLLM asks only for requests whose turn has come."""
        waiting, self._unsent = self._unsent, []
        for tracked in waiting:
            if tracked.lookup:
                tracked.lookup.send()
                if not tracked.lookup.is_sent:
                    self._unsent.append(tracked)

    def _answered(self, tracked: RequestState) -> bool:
        """Whether the lookup has come back; waits for it for a moment. Raises if it failed or took too long."""
        started = time.monotonic()
        assert tracked.lookup
        try:
            while (found := tracked.lookup.answer()) is None and time.monotonic() - started < self._patience_s:
                time.sleep(50e-6)
        finally:
            # Shared by all requests of a step: a hundred that wait must not hold up those that run.
            self._patience_s = max(0.0, self._patience_s - (time.monotonic() - started))
        if found is None:
            return False
        tracked.found, tracked.stage = found, Stage.FOUND
        return True

    def _decide(self, tracked: RequestState, local: int) -> tuple[int, bool]:
        request = tracked.request
        decision = decide(
            tracked.matches,
            request.num_tokens,
            local,
            self._settings.policy,
            blend=tracked.mode == "blend" and can_salt(request),
            holes=self._admission.holes_for(request),
            ratio=tracked.ratio,
            usual_ratio=self._settings.recompute_ratio,
            on_the_way=tracked.found.on_the_way_tokens if tracked.found else 0,
        )
        if isinstance(decision, Refusal):
            self._refuse(tracked, decision)
            return 0, False
        tracked.decision = decision
        return decision.end - local, True

    def _refuse(self, tracked: RequestState, refusal: Refusal) -> None:
        tracked.refusal, tracked.stage = refusal, Stage.COMPUTED
        self._count_refusal(tracked, refusal)
        self._end_lookup(tracked)

    def _count_refusal(self, tracked: RequestState, refusal: Refusal) -> None:
        if refusal.code not in self._told:
            self._told.add(refusal.code)
            log.info("request %s: nothing is reused: %s", tracked.id, refusal.reason)
        self.counters[f"refused_{refusal.code}"] += 1

    def _count_reservation(self, error: BaseException) -> None:
        reason = type(error).__name__
        if reason not in self._told:
            self._told.add(reason)
            log.warning("the hub gives no room for what is computed, so that it is not stored: %s", error)
        self.counters[f"reservations_failed_{reason}"] += 1

    def _end_lookup(self, tracked: RequestState) -> None:
        """End the lease that the lookup brought; what it found is remembered, for it need not be stored again."""
        lookup, tracked.lookup = tracked.lookup, None
        if lookup:
            lookup.close()

    # The rest.

    def _budget(self, step: SchedulerOutput) -> int:
        """How many tokens of recomputation go into a step beside what vLLM scheduled."""
        settings, most = self._settings, self._config.scheduler_config.max_num_batched_tokens
        left = most - step.total_num_scheduled_tokens
        budget = max(left, settings.min_blend_tokens_per_step)
        return min(budget, settings.blend_tokens_per_step or budget)
