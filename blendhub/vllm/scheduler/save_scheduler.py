"""Scheduler side of saving: reserves slots in the hub and schedules the workers' writes."""

import contextlib
import time
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue

import numpy as np
from vllm.v1.core.sched.output import SchedulerOutput

from blendhub.client.hub_client import HubClient, Reservation
from blendhub.core.errors import AdapterReplaced, BlendHubError, DeadlineExceeded
from blendhub.core.layout import MIN_SAVED_TOKENS
from blendhub.core.spans import Span, join_spans
from blendhub.vllm.hub_executor import HubExecutor
from blendhub.vllm.messages import NULL_BLOCK, SaveJob, StepPlan
from blendhub.vllm.scheduler.admission import Admission
from blendhub.vllm.scheduler.blocks.block_tables import BlockTables
from blendhub.vllm.scheduler.blocks.prefix_cache import RequestBlocks, Tables
from blendhub.vllm.scheduler.blocks.scratch import Scratch
from blendhub.vllm.scheduler.reports import Reports
from blendhub.vllm.scheduler.request_state import RequestState, Stage
from blendhub.vllm.scheduler.save_plan import Kind, RequestSaves, SavePlan
from blendhub.vllm.scheduler.startup import ArenaWatch
from blendhub.vllm.settings import Settings


class SaveScheduler:
    """All methods are called by the scheduler's thread, and none waits for the hub."""

    def __init__(
        self,
        executor: HubExecutor,
        blocks: RequestBlocks,
        scratch: Scratch,
        arena: ArenaWatch,
        admission: Admission,
        reports: Reports,
        settings: Settings,
        tables: BlockTables,
        *,
        speculates: bool = False,
    ) -> None:
        """``speculates``: a step may compute tokens that the answer does not get."""
        self._executor = executor
        self._blocks = blocks
        self._scratch = scratch
        self._arena = arena
        self._adapters = admission.adapters
        self._ranks = admission.namespace.world_size
        self._reports = reports
        self._timeout_s = settings.lookup_timeout_s
        self._tables = tables
        self._speculates = speculates
        self._piece_tokens = 0
        """vLLM frees blocks that have left a window, so answers are stored before that, in pieces of so many tokens."""
        if tables.shortest_window:
            self._piece_tokens = max(1, min(admission.namespace.layout.chunk_tokens, tables.shortest_window // 2))
        self._failures: SimpleQueue[BaseException] = SimpleQueue()
        """The errors of failed reservations; the executor's thread adds some."""
        self._running: dict[str, RequestSaves] = {}
        self._open: dict[str, RequestSaves] = {}
        """The running requests of which something is left to plan or to write. Steps look at no others."""
        self._ending: dict[str, RequestSaves] = {}
        """The ended requests whose blocks vLLM keeps for saves that no plan has named yet."""
        self._announced: dict[str, RequestSaves] = {}
        """The ended requests that a plan has said to have no more saves, until the workers have committed all."""

    @property
    def is_busy(self) -> bool:
        """Whether the workers still have saves to do or to commit for requests that have ended."""
        return bool(self._ending or self._announced)

    def begin(self, request: RequestState) -> None:
        """vLLM has allocated blocks for a request, for the first time or after it was preempted."""
        if request.terms.stores:
            self._open[request.id] = self._running.setdefault(request.id, RequestSaves(request))

    def plan_step(self, plan: StepPlan, step: SchedulerOutput) -> None:
        """Add the saves of what this step computes, and of requests that have ended."""
        self._arena.look()
        for name, saves in list(self._open.items()):
            self._note_brought(saves)
            if n_scheduled := step.num_scheduled_tokens.get(name):
                self._save_running(saves, n_scheduled, plan)
        for saves in list(self._ending.values()):
            self._save_ended(saves, plan)
        while not self._failures.empty():
            self._reports.unreserved(self._failures.get())
        self._scratch.end_step(self._needs_blocks)

    def prepare(self, request: RequestState, are_opening: bool, within: float) -> bool:
        """Reserve slots for a request that vLLM is about to schedule; returns whether its first step can be stored.

        Where vLLM frees blocks that have left a window, those of a long first step are gone in the second one: then the
        request waits for the hub's answer, ``within`` so many seconds here and then for later steps, and for workers
        whose sessions ``are_opening``.
        """
        if not self._piece_tokens or not request.terms.stores or request.request.lora_request:
            return True
        saves = self._running.setdefault(request.id, RequestSaves(request))
        plan = self._planned(saves)
        is_ready = not are_opening and (plan is None or plan.answered(within))
        return is_ready or time.monotonic() > saves.since + self._timeout_s

    def end(self, request: RequestState, tables: Tables) -> bool:
        """A request has ended; returns whether its blocks are still needed."""
        saves = self._running.pop(request.id, None)
        self._open.pop(request.id, None)
        if saves is None or saves.are_over:
            if saves:
                self._abandon(saves)
            self._scratch.give_back(request.id)
            return False
        # The last token was sampled but not computed; tokens that are being computed now were not sampled yet.
        computed = min(request.request.num_computed_tokens, request.request.num_tokens - 1)
        saves.end(computed, tables, self._ranks)
        self._ending[request.id] = saves
        self._plan_answer(saves)
        return True

    def committed(self, requests: Mapping[str, int]) -> None:
        """Count ranks that have done all commits of these requests; one that all ranks have done is forgotten."""
        for name, ranks in requests.items():
            saves = self._announced[name]
            saves.uncommitted_ranks -= ranks
            if not saves.uncommitted_ranks:
                self._abandon(self._announced.pop(name))

    def _needs_blocks(self, name: str) -> bool:
        """Whether some of what a request has loaded or computed is still to be written."""
        saves = self._open.get(name)
        return name in self._ending or (saves is not None and (saves.plan is None or saves.plan.is_pending))

    def retire(self, request: RequestState) -> None:
        """Schedule no more saves under the present plan; the next step makes another one."""
        if saves := self._running.get(request.id):
            saves.retire()
            self._open[request.id] = saves

    def abort(self, request: RequestState) -> None:
        """A request was aborted before vLLM computed any of it: end its write rights."""
        self._open.pop(request.id, None)
        if saves := self._running.pop(request.id, None):
            self._abandon(saves)

    def drop_all(self) -> None:
        """Store nothing that was computed until now, nor what the workers are saving."""
        for saves in [*self._running.values(), *self._ending.values(), *self._announced.values()]:
            saves.is_dropped = True
            for plan in saves.plans:
                plan.drop()
            self._abandon(saves)

    def _note_brought(self, saves: RequestSaves) -> None:
        """Notice what another connector loads, or has loaded."""
        request, before = saves.request, saves.request.request.num_computed_tokens
        behind = max(saves.reached, request.reused_end)
        if before <= behind or request.stage is Stage.LOADING:
            return
        # In windows, only the last blocks are loaded. What vLLM computes behind them is stored by a plan without them,
        # which the hub answers while the other connector loads.
        request.bring(Span(behind, before), is_whole=not self._piece_tokens)
        saves.reached = before
        if self._piece_tokens:
            self._abandon(saves)
            self._planned(saves)

    def _save_running(self, saves: RequestSaves, n_scheduled: int, plan: StepPlan) -> None:
        """Add the saves of a request of which this step computes so many tokens."""
        request, vllms = saves.request, saves.request.request
        saves.begun_in = saves.begun_in or plan.number
        before = vllms.num_computed_tokens
        saves.reached = before + n_scheduled
        if save_plan := self._planned(saves):
            reached = min(saves.reached, vllms.num_prompt_tokens)
            if self._piece_tokens:
                reached = max(reached, self._plan_piece(request, save_plan, before))
            tables = self._blocks.of(request.id)
            self._schedule(saves, save_plan, reached, tables, plan)
        if saves.is_dropped or (save_plan and save_plan.is_done and not self._piece_tokens):
            del self._open[request.id]

    def _save_ended(self, saves: RequestSaves, plan: StepPlan) -> None:
        request, save_plan = saves.request, self._plan_answer(saves)
        # Read before: the hub may answer at any moment, and its answer must not be missed.
        is_pending = save_plan.is_pending if save_plan else not saves.is_dropped
        if save_plan:
            self._schedule(saves, save_plan, saves.computed, saves.tables, plan)
        if is_pending:
            if time.monotonic() < saves.ended_at + self._timeout_s:
                return
            missing = "the hub reserved no slots" if save_plan else "the workers reported no LoRA adapter"
            self._failures.put(DeadlineExceeded(f"{missing} within lookup_timeout_s {self._timeout_s} of the end"))
        plan.ending.add(request.id)
        self._announced[request.id] = self._ending.pop(request.id)

    def _planned(self, saves: RequestSaves) -> SavePlan | None:
        """The plan, made once the adapter of the KV is known; None until then, and if nothing may be stored."""
        if saves.plan is None and not saves.is_dropped and self._is_of_one_adapter(saves):
            saves.plan = self._new_plan(saves.request)
        return saves.plan

    def _plan_answer(self, saves: RequestSaves) -> SavePlan | None:
        plan, request = self._planned(saves), saves.request
        if plan and not saves.has_answer:
            saves.has_answer = True
            if not request.has_media:
                plan.add_answer(request.prompt_end, saves.computed, request.first_approximate is None)
        return plan

    def _plan_piece(self, request: RequestState, save_plan: SavePlan, before: int) -> int:
        """Plan the next piece of an answer, if that was computed; returns how far KV is computed for good.

        ``before``: the tokens before this step. The last token that was sampled is not computed yet.
        """
        computed = min(before, request.request.num_tokens - 1)
        if not request.has_media:
            save_plan.add_answer(request.prompt_end, computed, request.first_approximate is None, self._piece_tokens)
        return computed

    def _is_of_one_adapter(self, saves: RequestSaves) -> bool:
        """Whether all KV of a request was computed with the weights that its adapter has now, as far as is known.

        The workers check it again for each save.
        """
        request, lora = saves.request, saves.request.request.lora_request
        if lora is None:
            return True
        # If it was not loaded when the request arrived, the report of the request's own step says what was loaded.
        adapter = request.terms.adapter or self._adapters.find(lora)
        if adapter is None:
            return False
        request.identify(adapter)
        if adapter.since <= saves.begun_in and not (request.engine_tokens and self._adapters.was_replaced(lora)):
            return True
        saves.is_dropped = True
        self._failures.put(
            AdapterReplaced(
                f"LoRA adapter {lora.lora_name} got other weights, and some of the KV may be of earlier ones"
            )
        )
        return False

    def _schedule(
        self, saves: RequestSaves, save_plan: SavePlan, computed: int, tables: Tables, plan: StepPlan
    ) -> None:
        request = saves.request
        tables = self._scratch.complete(request.id, tables)
        for save in save_plan.saves:
            part = save.next_part(computed)
            if part is None:
                continue
            right, slots, span = part
            sized = list(zip(tables, self._tables.block_sizes, strict=True))
            needed = tuple(np.asarray(blocks[: -(-span.end // size)], np.int64) for blocks, size in sized)
            if any(NULL_BLOCK in blocks[span.start // size : -(-span.end // size)] for blocks, size in sized):
                save.drop()
                self._failures.put(
                    DeadlineExceeded("vLLM had freed the blocks when the hub reserved slots for their KV")
                )
                continue
            plan.saves.append(SaveJob(request.id, right, slots, span, needed, request.terms.adapter))

    def _abandon(self, saves: RequestSaves) -> None:
        """Schedule no more saves, and end the rights; what is stored stays."""
        saves.retire()
        plans, saves.retired = saves.retired, []
        if any(plan.saves for plan in plans):
            # On the executor's thread, which knows the hub's answers to earlier reservations by then.
            self._executor.run(partial(_abort, plans))

    def _new_plan(self, request: RequestState) -> SavePlan:
        blended = request.first_approximate is not None
        stored = [match.span for match in request.matches if match.exact or blended]
        # What earlier requests blended is no text that could be moved.
        settled = [span for span in (request.settled_span, request.brought) if span]
        if self._piece_tokens and request.engine_tokens:
            # vLLM's own cache has only the last blocks of a window.
            stored.append(Span(0, request.engine_tokens))
        plan = SavePlan(partial(self._reserve, request), MIN_SAVED_TOKENS)
        if request.blended and self._arena.stores_blended:
            plan.blend(request.blended, [match.span for match in request.matches if not match.moved])
        plan.begin(request.prompt_end, join_spans([*stored, *settled]), request.first_approximate)
        return plan

    def _reserve(self, request: RequestState, span: Span, kind: Kind, run: int | None) -> "Future[Reservation]":
        reserve = partial(
            HubClient.reserve,
            tokens=request.tokens()[: span.end],
            span=span,
            variant=request.terms.variant,
            exact=kind == "exact",
            blended=kind == "blended",
            ratio=0.0 if kind == "exact" else request.ratio,
            run=run,
        )
        future = self._executor.run(reserve)
        future.add_done_callback(self._note_failure)
        return future

    def _note_failure(self, future: "Future[Reservation]") -> None:
        """Called by the executor's thread; counters belong to the scheduler's thread."""
        if error := future.exception():
            self._failures.put(error)


def _abort(plans: list[SavePlan], client: HubClient) -> None:
    for plan in plans:
        for right in plan.open_rights:
            with contextlib.suppress(BlendHubError):
                client.abort(right)
