"""Scheduler side of saving: reserves slots in the hub, and has the workers write each chunk that a step completes."""

import contextlib
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue

import numpy as np
import numpy.typing as npt
from vllm.v1.core.sched.output import SchedulerOutput

from blendhub.client.hub_client import HubClient, Reservation
from blendhub.core.errors import AdapterReplaced, BlendHubError, DeadlineExceeded
from blendhub.core.layout import MIN_SAVED_TOKENS
from blendhub.core.provenance import Provenance
from blendhub.core.spans import Span
from blendhub.vllm.hub_executor import HubExecutor
from blendhub.vllm.messages import NULL_BLOCK, SaveJob, StepPlan
from blendhub.vllm.scheduler.admission import Admission
from blendhub.vllm.scheduler.blocks.request_blocks import Tables
from blendhub.vllm.scheduler.blocks.scratch import Scratch
from blendhub.vllm.scheduler.reports import Reports
from blendhub.vllm.scheduler.request_saves import RequestSaves, ReservedSlots, SavedSpan, spans_to_save
from blendhub.vllm.scheduler.request_state import RequestState, Stage
from blendhub.vllm.scheduler.startup import ArenaWatch
from blendhub.vllm.settings import Settings


class SaveScheduler:
    """All methods are called by the scheduler's thread, and none waits for the hub."""

    def __init__(
        self,
        executor: HubExecutor,
        scratch: Scratch,
        arena: ArenaWatch,
        admission: Admission,
        reports: Reports,
        settings: Settings,
    ) -> None:
        self._executor = executor
        self._scratch = scratch
        self._arena = arena
        self._adapters = admission.adapters
        self._ranks = admission.namespace.world_size
        self._chunk_tokens = admission.namespace.layout.chunk_tokens
        self._reports = reports
        self._timeout_s = settings.lookup_timeout_s
        self._has_windows = scratch.tables.shortest_window is not None
        """Whether vLLM frees blocks of running requests: those that have left a window, of at least two chunks."""
        self._failures: SimpleQueue[BaseException] = SimpleQueue()
        """The errors of failed reservations; the executor's thread adds some."""
        self._running: dict[str, RequestSaves] = {}
        self._open: dict[str, RequestSaves] = {}
        """The running requests of which something is left to reserve or to write. Steps look at no others."""
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
            self._note_loaded_by_other(saves)
            n_scheduled = step.num_scheduled_tokens.get(name)
            if not n_scheduled:
                continue
            saves.begun_in = saves.begun_in or plan.number
            self._add_jobs(saves, self._reserve_computed(saves, n_scheduled), self._scratch.blocks.of(name), plan)
            if saves.is_dropped or (saves.is_planned and saves.is_done and not self._has_windows):
                del self._open[name]
        for saves in list(self._ending.values()):
            self._save_ended(saves, plan)
        while not self._failures.empty():
            self._reports.unreserved(self._failures.get())
        self._scratch.end_step(self._needs_blocks)

    def prepare(self, request: RequestState, are_opening: bool, within: float) -> bool:
        """Reserve slots for a request that vLLM is about to schedule; returns whether its first step can be stored.

        In the second step, vLLM frees blocks of the first that have left a window. So with windows, a request waits
        until the hub has reserved its slots, up to ``within`` seconds in each step, and until no worker's session is
        opening.
        """
        if not self._has_windows or not request.terms.stores or request.request.lora_request:
            return True
        saves = self._running.setdefault(request.id, RequestSaves(request))
        self._reserve_prompt(saves)
        is_ready = not are_opening and saves.are_answered(within)
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
        self._reserve_answer(saves, computed)
        return True

    def committed(self, requests: Mapping[str, int]) -> None:
        """Count ranks that have done all commits of these requests; one that all ranks have done is forgotten."""
        for name, ranks in requests.items():
            saves = self._announced.get(name)
            if saves is None:
                continue  # its blocks were kept for a repair only
            saves.uncommitted_ranks -= ranks
            if not saves.uncommitted_ranks:
                self._abandon(self._announced.pop(name))

    def begin_anew(self, request: RequestState) -> None:
        """What is known of a request has changed: the slots that are reserved are of another kind of KV."""
        if saves := self._running.get(request.id):
            saves.drop()
            self._open[request.id] = saves

    def repaired(self, request: RequestState) -> None:
        """All KV of a request is exact now, which may have ended: store it as such."""
        self.begin_anew(request)
        if saves := self._running.get(request.id):
            self._reserve_prompt(saves)

    def abort(self, request: RequestState) -> None:
        """A request was aborted before vLLM computed any of it: end its write rights."""
        self._open.pop(request.id, None)
        if saves := self._running.pop(request.id, None):
            self._abandon(saves)

    def drop_all(self) -> None:
        """Store nothing that was computed until now, nor what the workers are saving."""
        for saves in [*self._running.values(), *self._ending.values(), *self._announced.values()]:
            saves.is_dropped = True
            self._abandon(saves)

    def _needs_blocks(self, name: str) -> bool:
        """Whether some of what a request has loaded or computed is still to be written."""
        saves = self._open.get(name)
        return name in self._ending or (saves is not None and (not saves.is_planned or saves.is_pending))

    def _note_loaded_by_other(self, saves: RequestSaves) -> None:
        """Notice what another connector loads, or has loaded."""
        request, before = saves.request, saves.request.request.num_computed_tokens
        behind = max(saves.reached, request.reused_end)
        if before <= behind or request.stage is Stage.LOADING:
            return
        # In windows, only the last blocks are loaded. For what vLLM computes behind them, slots are reserved without
        # them, and the hub answers while the other connector loads.
        request.note_loaded_by_other(Span(behind, before), is_whole=not self._has_windows)
        saves.reached = before
        if self._has_windows:
            self._abandon(saves)
            self._reserve_prompt(saves)

    def _reserve_computed(self, saves: RequestSaves, n_scheduled: int) -> int:
        """Reserve slots for what a request has by the end of this step; returns up to where its KV can be written."""
        request = saves.request.request
        before = request.num_computed_tokens
        saves.reached = before + n_scheduled
        if not self._reserve_prompt(saves):
            return 0
        computed = min(saves.reached, request.num_prompt_tokens)
        if self._has_windows:
            # The last token that was sampled is not computed yet.
            answered = min(before, request.num_tokens - 1)
            self._reserve_answer(saves, answered // self._chunk_tokens * self._chunk_tokens)
            computed = max(computed, answered)
        return computed

    def _save_ended(self, saves: RequestSaves, plan: StepPlan) -> None:
        request, is_planned = saves.request, self._reserve_answer(saves, saves.computed)
        # Read before: the hub may answer at any moment, and its answer must not be missed.
        is_pending = saves.is_pending if is_planned else not saves.is_dropped
        if is_planned:
            self._add_jobs(saves, saves.computed, saves.tables, plan)
        if is_pending:
            if time.monotonic() < saves.ended_at + self._timeout_s:
                return
            missing = "the hub reserved no slots" if is_planned else "the workers reported no LoRA adapter"
            self._failures.put(DeadlineExceeded(f"{missing} within lookup_timeout_s {self._timeout_s} of the end"))
        plan.ending.add(request.id)
        self._announced[request.id] = self._ending.pop(request.id)

    def _reserve_prompt(self, saves: RequestSaves) -> bool:
        """Reserve slots for what the hub lacks of the prompt; returns False until its adapter is known."""
        if not saves.is_planned and not saves.is_dropped and self._is_of_one_adapter(saves):
            saves.is_planned = True
            stores_blended = self._arena.stores_blended
            for saved in spans_to_save(
                saves.request, MIN_SAVED_TOKENS, stores_blended=stores_blended, keeps_windows=self._has_windows
            ):
                saves.reserved.append(self._reserve(saves.request, saved, None))
        return saves.is_planned

    def _reserve_answer(self, saves: RequestSaves, end: int) -> bool:
        """Reserve slots for the generated tokens up to ``end``, too, whose KV is computed."""
        request, start = saves.request, saves.answer_end
        if self._reserve_prompt(saves) and end > start and not request.has_media:
            last = saves.reserved[-1].answer if saves.reserved else None
            run = last.run if last and last.span.end == start else None
            kind = SavedSpan(Span(start, end), "exact" if request.first_approximate is None else "behind")
            saves.reserved.append(self._reserve(request, kind, run))
            saves.answer_end = end
        return saves.is_planned

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

    def _add_jobs(self, saves: RequestSaves, computed: int, tables: Tables, plan: StepPlan) -> None:
        """Have each chunk written that is complete with the tokens up to ``computed``."""
        request = saves.request
        tables = self._scratch.complete(request.id, tables)
        blocks: tuple[npt.NDArray[np.int64], ...] = ()
        for reserved in saves.reserved:
            for right, slot in reserved.take_complete(computed):
                blocks = blocks or tuple(np.asarray(table, np.int64) for table in tables)
                if self._are_freed(blocks, slot.span):
                    reserved.drop()
                    freed = "vLLM had freed the blocks when the hub reserved slots for their KV"
                    self._failures.put(DeadlineExceeded(freed))
                    break
                plan.saves.append(SaveJob(request.id, right, slot, blocks, request.terms.adapter))

    def _are_freed(self, blocks: Sequence[npt.NDArray[np.int64]], span: Span) -> bool:
        sized = zip(blocks, self._scratch.tables.block_sizes, strict=True)
        return any(NULL_BLOCK in table[span.start // size : -(-span.end // size)] for table, size in sized)

    def _abandon(self, saves: RequestSaves) -> None:
        """Schedule no more saves, and end the rights; what is stored stays."""
        saves.drop()
        reserved, saves.reserved = saves.reserved, []
        if reserved:
            # On the executor's thread, which knows the hub's answers to earlier reservations by then. If there is no
            # session, the client ends the rights as soon as there is one.
            self._executor.run_later(partial(_abort, reserved, self._executor.client))

    def _reserve(self, request: RequestState, saved: SavedSpan, run: int | None) -> ReservedSlots:
        span, kind = saved
        provenance = Provenance(
            "after_blended" if kind == "behind" else kind,
            1.0 if kind == "exact" else request.ratio,
            request.terms.movable_from,
        )
        reserve = partial(
            HubClient.reserve,
            tokens=request.tokens()[: span.end],
            span=span,
            variant=request.terms.variant,
            provenance=provenance,
            run=run,
        )
        future: Future[Reservation] = self._executor.run(reserve)
        future.add_done_callback(self._note_failure)
        return ReservedSlots(future)

    def _note_failure(self, future: "Future[Reservation]") -> None:
        """Called by the executor's thread; counters belong to the scheduler's thread."""
        if error := future.exception():
            self._failures.put(error)


def _abort(reserved: list[ReservedSlots], client: HubClient) -> None:
    for slots in reserved:
        if right := slots.unused_right:
            with contextlib.suppress(BlendHubError):
                client.abort(right)
