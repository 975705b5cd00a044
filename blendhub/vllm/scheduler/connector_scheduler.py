"""The connector in vLLM's scheduler: the requests, the plan of each step, and the workers' reports."""

import contextlib
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from blendhub.core.errors import BlendHubError
from blendhub.framework.observers import Observers
from blendhub.vllm.hub_executor import HubExecutor
from blendhub.vllm.messages import HubPlace, StepPlan, WorkerReport
from blendhub.vllm.scheduler.admission import Admission
from blendhub.vllm.scheduler.audits import Audits
from blendhub.vllm.scheduler.blend_queue import BlendQueue
from blendhub.vllm.scheduler.blocks.block_tables import BlockTables
from blendhub.vllm.scheduler.blocks.request_blocks import RequestBlocks, Tables
from blendhub.vllm.scheduler.blocks.scratch import Scratch
from blendhub.vllm.scheduler.load_scheduler import LoadScheduler
from blendhub.vllm.scheduler.repair_pace import RepairPace
from blendhub.vllm.scheduler.repairs import Repairs
from blendhub.vllm.scheduler.reports import Reports
from blendhub.vllm.scheduler.request_state import RequestState, Stage
from blendhub.vllm.scheduler.save_scheduler import SaveScheduler
from blendhub.vllm.scheduler.startup import ArenaWatch, StartupFacts
from blendhub.vllm.watching.stats import BlendHubStats


class ConnectorScheduler:
    """All methods are called by the scheduler's thread. Only ``matched`` waits for the hub."""

    def __init__(
        self,
        requests: dict[str, RequestState],
        executor: HubExecutor,
        admission: Admission,
        loads: LoadScheduler,
        saves: SaveScheduler,
        repairs: Repairs,
        reports: Reports,
    ) -> None:
        """``requests``: empty, and shared with those that need all requests."""
        self.executor = executor
        self.loads = loads
        self.saves = saves
        self.repairs = repairs
        self.reports = reports
        self._requests = requests
        self._admission = admission
        self._unsent_place: HubPlace | None = executor.place
        """The hub's place, which is sent to the workers in the first plan after the hub was reached."""
        self._closed_ranks = admission.namespace.world_size
        """The number of ranks that have not tried yet to reach the hub."""
        self._n_steps = 0
        self._plan = StepPlan()
        """The next plan, as far as it is known."""
        self.closing = contextlib.ExitStack()
        """What ends with the scheduler side."""

    # A request arrives, and is scheduled.

    def arrived(self, request: Request) -> None:
        terms, refusal = self._admission.admit(request)
        state = self._requests[request.request_id] = RequestState(request, terms)
        self.loads.settled.take(state)
        if refusal:
            self.reports.refuse(state, refusal)
            return
        # Long before vLLM schedules it. What fails now is tried again then.
        with contextlib.suppress(BlendHubError):
            self.loads.look_up(state)

    def matched(self, request: Request, local: int) -> tuple[int | None, bool]:
        """The number of tokens after the first ``local`` that come from BlendHub; None: ask again in a later step."""
        state = self._requests.get(request.request_id)
        if not state:
            return 0, False
        matched, is_loaded = self.loads.matched(state, local)
        can_store = matched is None or self.saves.prepare(state, self._are_opening, self.loads.wait_left_s)
        return (matched if can_store or is_loaded else None), is_loaded

    def allocated(self, request: Request, tables: Tables, n_external: int) -> None:
        """Note that vLLM has allocated blocks for the tokens that ``matched`` returned."""
        state = self._requests.get(request.request_id)
        if state is None:
            return
        was_approximate_from = state.first_approximate
        if load := self.loads.allocated(state, tables, n_external):
            self._plan.loads.append(load)
        if state.first_approximate != was_approximate_from:
            # If it was preempted, its slots would store as exact what is approximate from now on.
            self.saves.begin_anew(state)
        if state.stage is not Stage.LOADING:
            self.repairs.add(state)
        self.saves.begin(state)
        self.reports.begun(state)

    # A step.

    def plan(self, step: SchedulerOutput) -> StepPlan:
        """The workers' part of this step."""
        plan, self._plan = self._plan, StepPlan()
        self._n_steps += 1
        plan.number, plan.preempted = self._n_steps, set(step.preempted_req_ids or ())
        plan.computes = step.total_num_scheduled_tokens > 0
        plan.budget = self.loads.begin_step(step.total_num_scheduled_tokens)
        if self._unsent_place and self.executor.client.is_up:
            plan.hub, self._unsent_place = self._unsent_place, None
        self.repairs.plan(plan, step)
        for state, tables in self.repairs.take_over():
            self.reports.tell(state)
            if not self.saves.end(state, tables):
                plan.ending.add(state.id)
        self.saves.plan_step(plan, step)
        return plan

    def process_report(self, report: WorkerReport) -> None:
        """Take note of what the workers have done."""
        self._closed_ranks -= report.opened
        self._admission.adapters.report(report.adapters)
        self.reports.count_work(report)
        self.saves.committed(report.committed_ranks)
        for name, result in report.loads.items():
            state = self._requests.get(name)
            self.loads.loaded(name, state, result)
            if state:
                self.repairs.add(state)
        for state in self.repairs.reported(report.repairs):
            self.saves.repaired(state)

    # A request ends.

    def ended(self, request: Request, tables: Tables) -> tuple[bool, dict[str, Any] | None]:
        """End a request. Returns whether its blocks are still needed, and the report for the response."""
        state = self._requests.pop(request.request_id, None)
        if state is None:
            return False, None
        response = self.reports.response(state)
        self.loads.ended(state)
        if state.stage is Stage.LOADING:
            self._plan.cancelled.add(state.id)
        if state.stage is Stage.LOADING or not state.is_scheduled:
            # vLLM keeps the blocks until the workers report that they have stopped.
            self.saves.abort(state)
            self.reports.tell(state)
            return False, response
        if self.repairs.keep(state, tables):
            return True, response
        self.reports.tell(state)
        return self.saves.end(state, tables), response

    @property
    def has_work(self) -> bool:
        """Whether steps are needed although there is no request: for saves and repairs, and until the workers use the
        hub."""
        return self.saves.is_busy or self.repairs.is_busy or self._are_opening

    @property
    def _are_opening(self) -> bool:
        """Whether ranks have yet to try to reach a hub that is there."""
        return self._closed_ranks > 0 and self.executor.client.is_up

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
        self.loads.clear(self._requests.values())
        self.executor.clear()

    def close(self) -> None:
        self.closing.close()


def build_scheduler(
    config: VllmConfig,
    facts: StartupFacts,
    admission: Admission,
    executor: HubExecutor,
    observers: Observers,
    blocks: RequestBlocks,
    tables: BlockTables,
) -> ConnectorScheduler:
    """The scheduler side. ``executor`` has tried to reach the hub."""
    settings, requests = facts.settings, dict[str, RequestState]()
    arena = ArenaWatch(facts, executor)
    arena.look()
    reports = Reports(executor.run, observers)
    scratch = Scratch(blocks, tables, settings.lookup_timeout_s)
    loads = LoadScheduler(
        facts,
        executor,
        blocks,
        scratch,
        BlendQueue(config.scheduler_config.max_num_batched_tokens, requests),
        reports,
    )
    saves = SaveScheduler(executor, scratch, arena, admission, reports, settings)
    pace = RepairPace(facts.costs, settings.repair_share, lag=_steps_ahead(config))
    audits = Audits(settings, facts.audits, admission.namespace.digest)
    most = config.scheduler_config.max_num_batched_tokens
    repairs = Repairs(settings, audits, pace, most, scratch, requests, reports.counters)
    return ConnectorScheduler(requests, executor, admission, loads, saves, repairs, reports)


def _steps_ahead(config: VllmConfig) -> int:
    """How many steps vLLM plans ahead of the one that it computes. Where a CPU's worker is in the scheduler's process,
    each is computed as soon as it is planned, also if vLLM schedules asynchronously."""
    computes_at_once = (
        config.device_config.device_type == "cpu" and config.parallel_config.distributed_executor_backend == "uni"
    )
    return int(bool(config.scheduler_config.async_scheduling) and not computes_at_once)
