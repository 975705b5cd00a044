"""Scheduler side of saving: reserves slots in the hub, and has the workers write each chunk that a step completes."""

import time
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
from vllm.v1.core.sched.output import SchedulerOutput

from blendhub.client.hub_client import HubClient
from blendhub.core.errors import AdapterReplaced, DeadlineExceeded
from blendhub.core.layout import MIN_SAVED_TOKENS
from blendhub.core.provenance import Provenance
from blendhub.core.spans import Span, gaps, join_spans
from blendhub.vllm.messages import NULL_BLOCK, SaveJob, StepPlan
from blendhub.vllm.scheduler.admission import Admission
from blendhub.vllm.scheduler.blocks.scratch import Scratch
from blendhub.vllm.scheduler.reports import Reports
from blendhub.vllm.scheduler.request.blocks import Tables
from blendhub.vllm.scheduler.request.reuse import Stage
from blendhub.vllm.scheduler.request.saves import ReservedSlots
from blendhub.vllm.scheduler.request.served_request import Ending, Requests, ServedRequest
from blendhub.vllm.scheduler.startup import ArenaWatch


class SaveScheduler:
    """All methods are called by the scheduler's thread. Only ``prepare`` waits for the hub.

    What is reserved of a request is written by the workers as steps complete it. Once the request has ended, its blocks
    are kept until everything is reserved and named in a plan, and the record until the workers have committed that.
    """

    def __init__(
        self,
        client: HubClient,
        requests: Requests,
        scratch: Scratch,
        arena: ArenaWatch,
        admission: Admission,
        reports: Reports,
        timeout_s: float,
    ) -> None:
        self._client = client
        self._requests = requests
        self._scratch = scratch
        self._arena = arena
        self._adapters = admission.adapters
        self._chunk_tokens = admission.namespace.layout.chunk_tokens
        self._reports = reports
        self._timeout_s = timeout_s
        self.has_windows = scratch.tables.shortest_window is not None
        """Whether vLLM frees blocks of running requests: those that have left a window, of at least two chunks."""

    def plan_step(self, plan: StepPlan, step: SchedulerOutput) -> None:
        """Add the saves of what this step computes, and of requests that have ended."""
        self._arena.look()
        for request in self._requests.busy.values():
            if not request.terms.stores or not request.blocks.are_allocated:
                continue
            saves, n_scheduled = request.saves, step.num_scheduled_tokens.get(request.id)
            if saves.is_done and not self.has_windows:
                continue
            self._count_refused(request)
            self._note_loaded_by_other(request)
            if n_scheduled:
                saves.begun_in = saves.begun_in or plan.number
                computed = self._reserve_computed(request, n_scheduled)
                self._add_jobs(request, computed, self._scratch.blocks.of(request.id), plan)
        for request in self._requests.ended.values():
            if request.ending is Ending.SAVING:
                self._save_ended(request, plan)
        self._scratch.end_step(self._needs_blocks)

    def prepare(self, request: ServedRequest, are_opening: bool, within: float) -> bool:
        """Reserve slots for a request that vLLM is about to schedule; returns whether its first step can be stored.

        In the second step, vLLM frees blocks of the first that have left a window. So with windows, a request waits
        until the hub has reserved its slots, up to ``within`` seconds in each step, and until no worker's session is
        opening.
        """
        if not self.has_windows or not request.terms.stores or request.request.lora_request:
            return True
        saves, now = request.saves, time.monotonic()
        saves.asked_at = saves.asked_at or now
        self._reserve_prompt(request)
        is_ready = not are_opening and saves.are_answered(within)
        return is_ready or now > saves.asked_at + self._timeout_s

    def end(self, request: ServedRequest) -> bool:
        """A request has ended, and is repaired no more; returns whether its blocks are still needed to store it."""
        saves = request.saves
        # Of what was dropped, workers may have copies under way.
        is_over = not (saves.begun_in and (saves.is_planned or saves.is_dropped or request.lacks_adapter))
        if is_over:
            saves.close()
            self._scratch.give_back(request.blocks)
        else:
            self._reserve_answer(request, _written_end(request))
        return not is_over

    def begin_anew(self, request: ServedRequest) -> None:
        """What is known of a request has changed: the slots that are reserved are of another kind of KV."""
        request.saves.drop()

    def repaired(self, request: ServedRequest) -> None:
        """All KV of a request is exact now, which may have ended: store it as such."""
        request.saves.drop()
        if request.saves.begun_in:
            self._reserve_prompt(request)

    def drop_all(self) -> None:
        """Store nothing that was computed until now, nor what the workers are saving."""
        for request in (*self._requests.known.values(), *self._requests.ended.values()):
            request.saves.is_dropped |= request.blocks.are_allocated
            request.saves.close()

    def _needs_blocks(self, request: ServedRequest) -> bool:
        """Whether some of what a request has loaded or computed is still to be written, or to be repaired."""
        saves = request.saves
        is_saved = request.terms.stores and not saves.is_dropped and (not saves.is_planned or saves.is_pending)
        if request.ending:
            is_saved = request.ending is Ending.SAVING
        return is_saved or request.repair.progress is not None

    def _note_loaded_by_other(self, request: ServedRequest) -> None:
        """Notice what another connector loads, or has loaded."""
        saves, before = request.saves, request.request.num_computed_tokens
        behind = max(saves.reached, request.reused_end)
        if before <= behind or request.reuse.stage is Stage.LOADING:
            return
        # In windows, only the last blocks are loaded. For what vLLM computes behind them, slots are reserved without
        # them, and the hub answers while the other connector loads.
        request.loaded_by_other(Span(behind, before), is_whole=not self.has_windows)
        saves.reached = before
        if self.has_windows:
            saves.close()
            self._reserve_prompt(request)

    def _reserve_computed(self, request: ServedRequest, n_scheduled: int) -> int:
        """Reserve slots for what a request has by the end of this step; returns up to where its KV can be written."""
        engine_request = request.request
        before = engine_request.num_computed_tokens
        request.saves.reached = before + n_scheduled
        if not self._reserve_prompt(request):
            return 0
        computed = min(request.saves.reached, engine_request.num_prompt_tokens)
        if self.has_windows:
            answered = _written_end(request)
            self._reserve_answer(request, answered // self._chunk_tokens * self._chunk_tokens)
            computed = max(computed, answered)
        return computed

    def _save_ended(self, request: ServedRequest, plan: StepPlan) -> None:
        saves, end = request.saves, _written_end(request)
        is_planned = self._reserve_answer(request, end)
        # Read before: the hub may answer at any moment, and its answer must not be missed.
        is_pending = saves.is_pending if is_planned else not saves.is_dropped
        self._count_refused(request)
        if is_planned:
            assert request.blocks.kept is not None
            self._add_jobs(request, end, request.blocks.kept, plan)
        if is_pending:
            if time.monotonic() < request.ended_at + self._timeout_s:
                return
            missing = "the hub reserved no slots" if is_planned else "the workers reported no LoRA adapter"
            late = DeadlineExceeded(f"{missing} within lookup_timeout_s {self._timeout_s} of the end")
            self._reports.unreserved(late)
        plan.ending.add(request.id)
        request.ending = Ending.COMMITTING

    def _reserve_prompt(self, request: ServedRequest) -> bool:
        """Reserve slots for what the hub lacks of the prompt; returns False until its adapter is known."""
        saves = request.saves
        if not saves.is_planned and not saves.is_dropped and self._is_of_one_adapter(request):
            saves.is_planned = True
            stores_blended = self._arena.stores_blended
            lacking = spans_to_save(request, stores_blended=stores_blended, keeps_windows=self.has_windows)
            saves.reserved += [self._reserve(request, span, provenance) for span, provenance in lacking]
        return saves.is_planned

    def _reserve_answer(self, request: ServedRequest, end: int) -> bool:
        """Reserve slots for the generated tokens up to ``end``, too, whose KV is computed."""
        saves = request.saves
        start = saves.answer_end
        if self._reserve_prompt(request) and end > start and not request.has_media:
            last = saves.reserved[-1].reservation if saves.reserved else None
            run = last.run if last and last.span.end == start else None
            provenance = request.kv.of_computed(request.terms.donates_from)
            saves.reserved.append(self._reserve(request, Span(start, end), provenance, run))
            saves.answer_end = end
        return saves.is_planned

    def _is_of_one_adapter(self, request: ServedRequest) -> bool:
        """Whether all KV of a request was computed with the weights that its adapter has now, as far as is known.

        The workers check it again for each save.
        """
        lora = request.request.lora_request
        if lora is None:
            return True
        # If it was not loaded when the request arrived, the report of the request's own step says what was loaded.
        adapter = request.terms.adapter or self._adapters.find(lora)
        if adapter is None:
            return False
        request.identify(adapter)
        was_replaced = request.blocks.engine_tokens and self._adapters.was_replaced(lora)
        if adapter.since <= request.saves.begun_in and not was_replaced:
            return True
        request.saves.is_dropped = True
        self._reports.unreserved(
            AdapterReplaced(
                f"LoRA adapter {lora.lora_name} got other weights, and some of the KV may be of earlier ones"
            )
        )
        return False

    def _add_jobs(self, request: ServedRequest, computed: int, tables: Tables, plan: StepPlan) -> None:
        """Have each chunk written that is complete with the tokens up to ``computed``."""
        tables = self._scratch.complete(request.blocks, tables)
        blocks: tuple[npt.NDArray[np.int64], ...] = ()
        for slots in request.saves.reserved:
            for right, slot in slots.take_complete(computed):
                blocks = blocks or tuple(np.asarray(table, np.int64) for table in tables)
                if self._are_freed(blocks, slot.span):
                    slots.drop()
                    freed = "vLLM had freed the blocks when the hub reserved slots for their KV"
                    self._reports.unreserved(DeadlineExceeded(freed))
                    break
                plan.saves.append(SaveJob(request.id, right, slot, blocks, request.terms.adapter))

    def _are_freed(self, blocks: Sequence[npt.NDArray[np.int64]], span: Span) -> bool:
        sized = zip(blocks, self._scratch.tables.block_sizes, strict=True)
        return any(NULL_BLOCK in table[span.start // size : -(-span.end // size)] for table, size in sized)

    def _count_refused(self, request: ServedRequest) -> None:
        """Forget the slots that the hub has not reserved."""
        for slots in list(request.saves.reserved):
            if slots.answer.done() and slots.answer.error:
                self._reports.unreserved(slots.answer.error)
                request.saves.reserved.remove(slots)

    def _reserve(
        self, request: ServedRequest, span: Span, provenance: Provenance, run: int | None = None
    ) -> ReservedSlots:
        tokens = request.tokens()[: span.end]
        return ReservedSlots(self._client.reserve(tokens, span, request.terms.variant, provenance, run))


def _written_end(request: ServedRequest) -> int:
    """The end of the tokens whose KV is computed: the last token was sampled, and its KV not computed yet."""
    return min(request.request.num_computed_tokens, request.request.num_tokens - 1)


def spans_to_save(
    request: ServedRequest, *, stores_blended: bool, keeps_windows: bool
) -> Iterator[tuple[Span, Provenance]]:
    """What the hub lacks of a prompt, except short spans between moved text: no lookup would find them again.

    ``keeps_windows``: vLLM's own cache has no more of some layers than the last window, which cannot be stored.
    """
    kv, terms, matches, n_prompt = request.kv, request.terms, request.reuse.matches, request.prompt_end
    first = kv.first_approximate
    if kv.blended and stores_blended:
        unmoved = [match.span for match in matches if not match.moved]
        if lacking := list(gaps(kv.blended, unmoved)):
            yield Span(lacking[0].start, lacking[-1].end), Provenance("blended", kv.ratio)
    # A trusted request offers all that is exact: the hub says of what it has a copy that may move.
    keeps_exact = not terms.donates
    stored = [match.span for match in matches if (keeps_exact if match.exact else first is not None)]
    # What was blended is no text that could be moved.
    stored += kv.not_computed
    if keeps_windows and request.blocks.engine_tokens:
        stored.append(Span(0, request.blocks.engine_tokens))
    stored = join_spans(stored)
    border = n_prompt if first is None else min(first, n_prompt)
    exact = Provenance(donates_from=terms.donates_from)
    yield from ((gap, exact) for gap in gaps(Span(0, border), stored))
    for gap in gaps(Span(border, n_prompt), stored):
        if gap.end == n_prompt or len(gap) >= MIN_SAVED_TOKENS:
            yield gap, kv.of_computed(terms.donates_from)
