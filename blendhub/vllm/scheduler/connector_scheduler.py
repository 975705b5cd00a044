"""The connector in vLLM's scheduler: looks up prompts, decides what is reused, and plans the workers' steps.

Only ``matched`` waits for the hub, for at most ``lookup_wait_ms`` a step.
"""

import logging
from collections import Counter
from typing import Any

import msgspec
import numpy as np
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from blendhub.core.errors import BlendHubError
from blendhub.framework.host import PluginHost
from blendhub.framework.observers import Observers
from blendhub.outcome.reasons import Why
from blendhub.vllm.decision import Refusal
from blendhub.vllm.hub_executor import HubExecutor
from blendhub.vllm.messages import HubAddress, HubPlace, LoadJob, StepPlan, WorkerReport
from blendhub.vllm.scheduler.admission import Admission
from blendhub.vllm.scheduler.audits import Audits
from blendhub.vllm.scheduler.decide import decide
from blendhub.vllm.scheduler.lookup import Reading
from blendhub.vllm.scheduler.lookups import Lookups
from blendhub.vllm.scheduler.reports import Reports
from blendhub.vllm.scheduler.request_state import RequestState, Stage
from blendhub.vllm.scheduler.salt_block_hashes import can_salt
from blendhub.vllm.scheduler.save_scheduler import SaveScheduler
from blendhub.vllm.scheduler.settling import Settling
from blendhub.vllm.scheduler.startup import ArenaWatch, StartupFacts
from blendhub.vllm.scheduler.step_budget import Pace, StepBudget
from blendhub.vllm.scheduler.turns import Turns
from blendhub.vllm.settings import Settings
from blendhub.vllm.stats import counts_of_load

log = logging.getLogger(__name__)


class ConnectorScheduler:
    """All methods are called by the scheduler's thread."""

    def __init__(
        self,
        config: VllmConfig,
        settings: Settings,
        admission: Admission,
        address: HubAddress,
        engine_id: str,
        host: PluginHost,
        facts: StartupFacts,
        observers: Observers,
    ) -> None:
        self.counters: Counter[str] = Counter()
        self._config = config
        self._settings = settings
        self._admission = admission
        self._n_positions = facts.max_model_len
        place = HubPlace(address, admission.namespace)
        self._unsent_place: HubPlace | None = place
        """The hub's place, which is sent to the workers in the first plan after the hub was reached."""
        self._closed_ranks = admission.namespace.world_size
        """The number of ranks that have not tried yet to reach the hub."""
        self.executor = HubExecutor(place, engine_id, -1, host)
        self.saves = SaveScheduler(
            self.executor,
            config.cache_config.block_size,
            settings,
            admission.namespace.world_size,
            lambda: self._arena.stores_blended,
            admission.adapters,
        )
        self.audits = Audits(settings, facts.audits, admission.namespace.digest, self.executor.run)
        self.settling = Settling(self.audits)
        self.lookups = Lookups(self.executor, settings, self.settling.least_ratio, self.counters)
        self._reports = Reports(self.executor.run, observers)
        self._requests: dict[str, RequestState] = {}
        self._budget = StepBudget(settings, config.scheduler_config.max_num_batched_tokens)
        self._turns = Turns(config.scheduler_config.max_num_batched_tokens)
        self._n_steps = 0
        self._begun_tokens: int | None = None
        """The result of ``_begun`` in this step, once a request has asked for it."""
        self._loads: list[LoadJob] = []
        self._reading: dict[str, Reading] = {}
        """The leases that workers copy under, by request; a request may have been aborted meanwhile."""
        self._cancelled: set[str] = set()
        self._logged: set[str] = set()
        """The reasons that were logged; each is logged once."""
        try:
            self.executor.reach()
        except BlendHubError:
            self.executor.close()
            raise
        self._arena = ArenaWatch(facts, lambda: self.executor.registered)
        self._arena.look()

    # A request arrives, and is scheduled.

    def arrived(self, request: Request) -> None:
        """Look up a new request at once, long before vLLM schedules it."""
        self._arena.look()
        terms, refusal = self._admission.admit(request)
        state = self._requests[request.request_id] = RequestState(request, terms)
        self.settling.take(state)
        if refusal:
            self._refuse(state, refusal)
        else:
            self.lookups.send(state)

    def matched(self, request: Request, local: int) -> tuple[int | None, bool]:
        """The number of tokens after the first ``local`` that come from BlendHub; None: ask again in a later step."""
        state = self._requests.get(request.request_id)
        if state is None:
            return 0, False
        # While it waited, other requests have settled what it repeats, or vLLM has evicted that.
        if not state.is_scheduled and self.settling.take(state):
            return None, False  # vLLM has to look into its cache again
        state.engine_tokens = local
        if request.skip_reading_prefix_cache and not state.refusal:
            self._refuse(
                state, Refusal(Why.ALL_COMPUTED, "the request needs every token computed, as prompt logprobs do")
            )
        if state.stage is not Stage.COMPUTING:
            try:
                if not self.lookups.has_found(state, local):
                    return None, False
            except BlendHubError as error:
                self._refuse(state, Refusal(Why.HUB_FAILED, f"{type(error).__name__}: {error}"))
            else:
                self._decide(state, local)
        if state.stage is Stage.FOUND:
            assert state.decision
            return state.decision.claimed_end(request.num_tokens) - local, True
        if self._turns.must_wait(request, request.num_tokens - local, self._begun()):
            return None, False
        return 0, False

    def allocated(self, request: Request, blocks: list[int], n_external: int) -> None:
        """Note that vLLM has allocated blocks for the tokens that ``matched`` returned."""
        state = self._requests.get(request.request_id)
        if state is None:
            return
        if not state.is_scheduled:
            state.scheduled()
            if self._begun_tokens is not None:
                self._begun_tokens += state.left_to_engine
            self.counters["tokens_settled"] += len(state.settled_span or ())
        if state.decision is None:
            return
        if not n_external:
            if state.stage is Stage.FOUND:
                self._refuse(state, Refusal(Why.OTHER_CONNECTOR, "another connector of MultiConnector loads its KV"))
            return
        decision, was_approximate_from = state.decision, state.first_approximate
        assert state.lookup
        reading = self._reading[state.id] = state.lookup.begin_reading()
        state.begin_load()
        if decision.audit:
            self.audits.begun(state)
        if n_recomputed := decision.n_recomputed(request.num_tokens):
            self._turns.begin(request, n_recomputed, self._pace())
        blocks_here = np.asarray(blocks, np.int64)
        self._loads.append(
            LoadJob(
                state.id,
                state.terms.variant,
                state.tokens(),
                blocks_here,
                decision,
                reading.lease,
                reading.epoch,
                decision.pieces_of(reading.pieces),
                state.terms.adapter,
            )
        )
        if state.first_approximate != was_approximate_from:
            # It was preempted: its save plan would store as exact what is approximate from now on.
            self.saves.retire(state)
        if decision.first_approximate is not None:
            # With one group of blocks, vLLM hashes whole blocks, whatever ``hash_block_size`` says.
            size = self._config.cache_config.block_size
            state.hashes.salt(decision.first_approximate, size, state.engine_tokens // size)

    # A step.

    def plan(self, step: SchedulerOutput) -> StepPlan:
        """The workers' part of this step."""
        self._begun_tokens = None
        self._turns.next_step()
        self.lookups.begin_step(self._requests.values())
        self.audits.report()
        self._n_steps += 1
        plan = StepPlan(number=self._n_steps, budget=self._budget.of_step(step.total_num_scheduled_tokens))
        if self._unsent_place and self.executor.is_up:
            plan.hub, self._unsent_place = self._unsent_place, None
        plan.loads, self._loads = self._loads, []
        plan.cancelled, self._cancelled = self._cancelled, set()
        plan.preempted = set(step.preempted_req_ids or ())
        self.saves.plan_step(step, self._requests, plan)
        while not self.saves.failed_reservations.empty():
            self._count_failed_reservation(self.saves.failed_reservations.get())
        return plan

    def process_report(self, report: WorkerReport) -> None:
        """Take note of what the workers have done."""
        self._closed_ranks -= report.opened
        self._admission.adapters.report(report.adapters)
        self.counters["saved_tokens"] += report.saved_tokens
        self.counters["save_microseconds"] += round(report.save_seconds * 1e6)
        self.counters["carried_bytes"] += report.carried_bytes
        for reason, count in report.failed_saves.items():
            self.counters[f"saves_failed_{reason}"] += count
        self.saves.settle(report.settled)
        for name, result in report.loads.items():
            if reading := self._reading.pop(name, None):
                reading.end()
            state = self._requests.get(name)
            if state and state.stage is Stage.LOADING:
                state.end_load(result)
                self._turns.end(state.request)
                self.counters.update(counts_of_load(state.outcome()))
                if result.audit and not result.error:
                    self.audits.ended(state, result.audit)
                self.settling.remember(state)

    # A request ends.

    def ended(self, request: Request, blocks: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """End a request. Returns whether its blocks are still needed, and the report for the response."""
        state = self._requests.pop(request.request_id, None)
        if state is None:
            return False, None
        self._turns.end(request)
        response = self._reports.ended(state.outcome(), explains=state.terms.explains)
        state.end_lookup()
        if state.stage is Stage.LOADING:
            # vLLM keeps the blocks until the workers report that they have stopped.
            self._cancelled.add(state.id)
            self.saves.abort(state)
            return False, response
        self.settling.remember(state)
        return self.saves.end(state, blocks), response

    @property
    def has_work(self) -> bool:
        """Whether steps are needed although there is no request: for saves, and until the workers use the hub."""
        return self.saves.is_busy or (self._closed_ranks > 0 and self.executor.is_up)

    def clear(self) -> bool:
        """Have the hub forget everything stored in this engine's namespaces; returns whether the hub is up.

        Earlier lookups are repeated, and pending saves are dropped.
        """
        self.saves.drop_all()
        self.settling.blocks.clear()
        self.executor.clear()
        for state in self._requests.values():
            if state.stage in (Stage.LOOKING_UP, Stage.FOUND):
                self.lookups.send(state)
        return self.executor.is_up

    def close(self) -> None:
        self.executor.close()

    # Lookups and decisions.

    def _decide(self, state: RequestState, local: int) -> None:
        request, terms = state.request, state.terms
        # What is blended before the load stays so: other requests may read these blocks.
        audited = state.first_approximate is None and self.audits.wants(state)
        ratio = self.audits.ratio_for(state, audited)
        choice = decide(
            state.matches,
            request.num_tokens,
            local,
            self._settings.policy,
            blend=terms.moves and ratio is not None and can_salt(request),
            holes=terms.mode != "contiguous" and self._admission.holes_for(request),
            ratio=ratio or 0.0,
            usual_ratio=self.audits.ratio or self._settings.max_ratio,
            on_the_way=state.found.on_the_way_tokens if state.found else 0,
            # The workers' tables of rotations are as long.
            n_positions=self._n_positions,
            pace=self._pace(),
        )
        decision = choice.decision
        if decision and audited and decision.first_approximate is not None:
            decision = msgspec.structs.replace(decision, audit=True)
            choice = msgspec.structs.replace(choice, decision=decision)
        state.decided(choice)
        if decision is None:
            assert choice.refusal
            self._refuse(state, choice.refusal)

    def _pace(self) -> Pace:
        return self._budget.pace(self._begun())

    def _begun(self) -> int:
        """The tokens that vLLM has yet to compute of the prompts that it has begun.

        They are counted once a step: many requests may wait, and be decided on.
        """
        if self._begun_tokens is None:
            self._begun_tokens = sum(state.left_to_engine for state in self._requests.values())
        return self._begun_tokens

    def _refuse(self, state: RequestState, refusal: Refusal) -> None:
        state.refuse(refusal)
        if refusal.why not in self._logged:
            self._logged.add(refusal.why)
            log.info("request %s: nothing is reused: %s", state.id, refusal.reason)
        self.counters[f"refused_{refusal.why}"] += 1

    # Counting.

    def _count_failed_reservation(self, error: BaseException) -> None:
        reason = type(error).__name__
        if reason not in self._logged:
            self._logged.add(reason)
            log.warning("computed KV is not stored: %s", error)
        self.counters[f"reservations_failed_{reason}"] += 1
