"""The connector in vLLM's scheduler: the requests, the plan of each step, and the workers' reports."""

import contextlib
import time
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from blendhub.client.hub_client import HubClient
from blendhub.framework.observers import Observers
from blendhub.vllm.messages import HubPlace, StepPlan, WorkerReport
from blendhub.vllm.model_support import ModelSupport
from blendhub.vllm.scheduler import repair_pace
from blendhub.vllm.scheduler.admission import Admission
from blendhub.vllm.scheduler.audits import Audits
from blendhub.vllm.scheduler.blend_queue import BlendQueue
from blendhub.vllm.scheduler.blocks.engine_blocks import EngineBlocks
from blendhub.vllm.scheduler.blocks.scratch import Scratch
from blendhub.vllm.scheduler.doubts import Doubts
from blendhub.vllm.scheduler.loads import LoadScheduler
from blendhub.vllm.scheduler.repairs import Repairs
from blendhub.vllm.scheduler.reports import Reports
from blendhub.vllm.scheduler.request.blocks import Tables
from blendhub.vllm.scheduler.request.reuse import Stage
from blendhub.vllm.scheduler.request.served_request import Ending, Requests, ServedRequest
from blendhub.vllm.scheduler.saves import SaveScheduler
from blendhub.vllm.scheduler.side import Matched, SchedulerSide
from blendhub.vllm.scheduler.startup import ArenaWatch, StartupFacts
from blendhub.vllm.settings import Settings
from blendhub.vllm.watching.stats import BlendHubStats


class ConnectorScheduler(SchedulerSide):
    """All methods are called by the scheduler's thread. Only ``matched`` waits for the hub."""

    def __init__(
        self,
        config: VllmConfig,
        facts: StartupFacts,
        admission: Admission,
        place: HubPlace,
        client: HubClient,
        observers: Observers,
        blocks: EngineBlocks,
    ) -> None:
        """``client`` has tried to reach the hub at ``place``."""
        self.client = client
        settings, max_tokens = facts.settings, config.scheduler_config.max_num_batched_tokens
        self.requests = requests = Requests()
        self._admission = admission
        self._block_size = blocks.hash_block_size
        self.reports = Reports(self.client, observers, requests)
        arena = ArenaWatch(facts, self.client)
        arena.look()
        scratch = Scratch(blocks, requests, settings.lookup_timeout_s)
        queue = BlendQueue(max_tokens, requests)
        self.loads = LoadScheduler(facts, self.client, requests, admission, scratch, queue, self.reports)
        self.saves = SaveScheduler(
            self.client, requests, scratch, arena, admission, self.reports, settings.lookup_timeout_s
        )
        self.repairs = Repairs(
            settings,
            Audits(settings, _can_audit(facts.support), admission.namespace.digest),
            Doubts(settings, facts.support.costs, max_tokens, self.reports.counters, self.reports.times),
            repair_pace.RepairPace(facts.support.costs, _limits(config, settings), lag=_steps_ahead(config)),
            scratch,
            requests,
            self.reports.counters,
        )
        self._unsent_place: HubPlace | None = place
        """The hub's place, which is sent to the workers in the first plan after the hub was reached."""
        self._n_ranks = self._closed_ranks = admission.namespace.world_size
        """The number of ranks, and of those that have not tried yet to reach the hub."""
        self._n_steps = 0
        self._plan = StepPlan()
        """The next plan, as far as it is known."""
        self.closing = contextlib.ExitStack()
        """What ends with the scheduler side."""

    # A request arrives, and is scheduled.

    def arrived(self, engine_request: Request) -> None:
        terms, refusal = self._admission.admit(engine_request)
        request = ServedRequest(engine_request, terms, self._block_size)
        self.requests.add(request)
        if refusal:
            self.reports.refuse(request, refusal)
        self.loads.arrived(request)

    def matched(self, engine_request: Request, local: int) -> Matched:
        """The number of tokens after the first ``local`` that come from BlendHub; None: ask again in a later step."""
        request = self.requests.get(engine_request.request_id)
        if not request:
            return 0, False
        matched, is_loaded = self.loads.matched(request, local)
        can_store = matched is None or self.saves.prepare(request, self._are_opening, self.loads.wait_left_s)
        return (matched if can_store or is_loaded else None), is_loaded

    def allocated(self, engine_request: Request, tables: Tables, n_external: int) -> None:
        """vLLM has allocated blocks for the tokens that ``matched`` returned."""
        request = self.requests.get(engine_request.request_id)
        if request is None:
            return
        was_approximate_from = request.first_approximate
        if n_external:
            # vLLM may preempt all requests between two steps, and resume some in the next one.
            self.repairs.preempted(request)
        if load := self.loads.allocated(request, tables, n_external):
            self._plan.loads.append(load)
        if request.first_approximate != was_approximate_from:
            # If it was preempted, its slots would store as exact what is approximate from now on.
            request.saves.drop()
        if request.reuse.stage not in (Stage.LOADING, Stage.LOADED):  # behind a load, the workers' report begins it
            self.repairs.begin(request)
        self.reports.begun(request)

    # A step.

    def plan(self, step: SchedulerOutput) -> StepPlan:
        """The workers' part of this step."""
        plan, self._plan = self._plan, StepPlan()
        self._n_steps += 1
        plan.number, plan.preempted = self._n_steps, set(step.preempted_req_ids or ())
        plan.computes = step.total_num_scheduled_tokens > 0
        if self._unsent_place and self.client.is_up:
            plan.hub, self._unsent_place = self._unsent_place, None
        self.loads.find_donors(plan, step)
        plan.budget = self.loads.begin_step(step.total_num_scheduled_tokens)
        # Before the saves: what will be repaired needs its blocks, and what is repaired no more is stored now.
        self.repairs.plan(plan, step)
        self._store_what_is_repaired_no_more(plan)
        # Last: it gives back the blocks that none of the above needs.
        self.saves.plan_step(plan, step)
        self.requests.end_step(saves_answers=self.saves.has_windows)
        return plan

    def process_report(self, report: WorkerReport) -> None:
        """Take note of what the workers have done."""
        self._closed_ranks -= report.opened
        self._admission.adapters.report(report.adapters)
        self.reports.count_work(report)
        for name, ranks in report.committed_ranks.items():
            self._committed(name, ranks)
        for name, result in report.loads.items():
            if request := self.requests.loading(name):
                if request.ending:
                    self.loads.stopped(request, result)
                    del self.requests.ended[name]
                else:
                    self.loads.loaded(request, result)
                    self.repairs.begin(request)
        self.repairs.computed(report.repaired)
        self.repairs.passed(report.margins)
        for request in self.repairs.reported(report.repairs):
            self.saves.repaired(request)

    # A request ends.

    def ended(self, engine_request: Request, tables: Tables) -> tuple[bool, dict[str, Any] | None]:
        """End a request. Returns whether its blocks are still needed, and the report for the response."""
        request = self.requests.end(engine_request.request_id)
        if request is None:
            return False, None
        response = self.reports.response(request)
        self.loads.ended(request)
        if request.reuse.stage is Stage.LOADING:
            # vLLM keeps the blocks until the workers report that they have stopped.
            self._plan.cancelled.add(request.id)
            self._go_on_ending(request, Ending.LOADING)
            request.saves.close()
            self.reports.tell(request)
            return False, response
        if self.repairs.goes_on(request):
            self._go_on_ending(request, Ending.REPAIRING, tables)
            return True, response
        self.reports.tell(request)
        is_saving = self._ends_saving(request, tables)
        if not is_saving:
            self._plan.cancelled.add(request.id)  # workers may have maps that nothing will store
        return is_saving, response

    @property
    def has_work(self) -> bool:
        """Whether steps are needed although there is no request: for what has ended, and until the workers use the
        hub."""
        return bool(self.requests.ended) or self._are_opening

    @property
    def _are_opening(self) -> bool:
        """Whether ranks have yet to try to reach a hub that is there."""
        return self._closed_ranks > 0 and self.client.is_up

    def take_stats(self) -> BlendHubStats | None:
        """The counts since the last call."""
        self.reports.time_first_tokens()
        return BlendHubStats.taken_from(self.reports.counters, self.reports.times, self.repairs.audits.take_records())

    def clear(self) -> None:
        """Have the hub forget everything stored in this engine's namespaces; until it has, nothing is found.

        Earlier lookups are repeated, and pending saves are dropped.
        """
        self.saves.drop_all()
        self.repairs.clear()
        self.loads.clear()
        self.client.clear_all()

    def close(self) -> None:
        self.closing.close()

    def _go_on_ending(self, request: ServedRequest, ending: Ending, tables: Tables | None = None) -> None:
        request.end(ending, time.monotonic(), tables, self._n_ranks)
        self.requests.ended[request.id] = request

    def _ends_saving(self, request: ServedRequest, tables: Tables) -> bool:
        """Whether blocks of a request that has ended are kept until all of it is stored."""
        if not self.saves.end(request):
            return False
        self._go_on_ending(request, Ending.SAVING, tables)
        return True

    def _store_what_is_repaired_no_more(self, plan: StepPlan) -> None:
        for request in list(self.requests.ended.values()):
            if request.ending is Ending.REPAIRING and not request.repair.progress:
                self.reports.tell(request)
                assert request.blocks.kept is not None
                if not self._ends_saving(request, request.blocks.kept):
                    plan.ending.add(request.id)
                    del self.requests.ended[request.id]

    def _committed(self, name: str, ranks: int) -> None:
        """So many more ranks have done all commits of a request; when all have, it is forgotten."""
        request = self.requests.ended.get(name)
        if request is None or request.ending is not Ending.COMMITTING:
            return  # its blocks were kept for a repair only
        request.uncommitted_ranks -= ranks
        if not request.uncommitted_ranks:
            request.saves.close()
            del self.requests.ended[name]


def _can_audit(support: ModelSupport) -> bool:
    """Whether the first token can be predicted from blended KV and from exact KV. With recurrent layers, the first is
    what the engine itself predicts: later on there is no state to predict it once more."""
    return support.audits and (support.holds or not support.state_layouts)


def _limits(config: VllmConfig, settings: Settings) -> repair_pace.Limits:
    on_cpu = config.device_config.device_type == "cpu"
    limits = repair_pace.ON_CPUS if on_cpu else repair_pace.ON_ACCELERATORS
    return limits if settings.repair_share is None else limits._replace(share=settings.repair_share)


def _steps_ahead(config: VllmConfig) -> int:
    """How many steps vLLM plans ahead of the one that it computes. Where a CPU's worker is in the scheduler's process,
    each is computed as soon as it is planned, also if vLLM schedules asynchronously."""
    computes_at_once = (
        config.device_config.device_type == "cpu" and config.parallel_config.distributed_executor_backend == "uni"
    )
    return int(bool(config.scheduler_config.async_scheduling) and not computes_at_once)
