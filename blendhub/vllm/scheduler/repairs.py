"""Repairs of approximate KV, while the answer behind it is written and for a while after: what each step computes."""

import logging
import math
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from vllm.v1.core.sched.output import SchedulerOutput

from blendhub.core.spans import Span
from blendhub.outcome.report import MAX_SPANS, RepairOutcome
from blendhub.vllm.messages import NULL_BLOCK, RepairJob, RepairResult, StepPlan
from blendhub.vllm.scheduler.audits import Audits
from blendhub.vllm.scheduler.blocks.scratch import Scratch
from blendhub.vllm.scheduler.doubts import Doubts
from blendhub.vllm.scheduler.repair_pace import RepairPace
from blendhub.vllm.scheduler.request.blocks import Tables
from blendhub.vllm.scheduler.request.repair import Progress
from blendhub.vllm.scheduler.request.served_request import Requests, ServedRequest
from blendhub.vllm.scheduler.request.terms import is_plain
from blendhub.vllm.settings import Settings

log = logging.getLogger(__name__)
MAX_ANSWERS = 4
"""With more answers under way, an engine is not idle."""
SHORT_ANSWER_TOKENS = 16
"""An answer of at most so many tokens ends before its repair does: a repair beside it would only slow it down."""
AUDIT_S = 60.0
"""How long an audit may go on behind the end of the answer."""
REPORT_STEPS = 3
"""So many steps after one, the workers have reported of it: vLLM may plan a step ahead, and samples behind reports."""
Blocks: TypeAlias = npt.NDArray[np.int64]
NO_BLOCKS: Blocks = np.empty(0, np.int64)
MIN_TOKENS_UNKNOWN = 64
"""While tokens are under way that are not known yet, no fewer are repaired: it would not be the last time."""
BANDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""The last answer tokens of the bands in which agreement is counted; all later tokens are in one more band."""


class Repairs:
    """All methods are called by the scheduler's thread; none waits."""

    def __init__(
        self,
        settings: Settings,
        audits: Audits,
        doubts: Doubts,
        pace: RepairPace,
        scratch: Scratch,
        requests: Requests,
        counters: "Counter[str]",
    ) -> None:
        self.audits = audits
        self._doubts = doubts
        self._after_s = settings.repair_after_s
        self._pace = pace
        self._scratch = scratch
        self._requests = requests
        self._counters = counters
        self._states = scratch.states
        self._has_windows = scratch.tables.shortest_window is not None
        self._n_steps = 0
        self._n_computing = 0
        """How many planned computations the device has not done yet."""
        self._stopped: set[str] = set()
        """The requests whose repair has stopped since the last plan, which says so to the workers."""

    def begin(self, request: ServedRequest) -> None:
        """A request has its KV; it is repaired if some of that is approximate. May be called again."""
        first, state = request.first_approximate, request.blocks.exact_state
        if first is None or not request.is_repairable or request.repair.progress:
            return
        if self._states.are_needed and (state is None or state.end != first):
            self._give_up(request, "no_state")
            return
        self.audits.begin(request)
        if request.repair.is_audited or request.terms.repair != "off" or request.terms.doubt:
            request.repair.progress = Progress(first)
        else:
            self._states.give_back(request.blocks)

    def plan(self, plan: StepPlan, step: SchedulerOutput) -> None:
        """Have the step compute tokens of one request anew."""
        scheduled, n_answers = step.num_scheduled_tokens, 0
        repaired = [(request, request.repair.progress) for request in self._requests if request.repair.progress]
        if repaired:
            n_answers = sum(request.is_answering for request in self._requests.running(scheduled))
        self._n_steps = plan.number
        self._pace.begin_step(n_answers, only_answers=n_answers == len(scheduled))
        is_low = bool(repaired) and self._scratch.is_low
        has_no_room = is_low or (any(request.ending for request, _ in repaired) and not self._has_room)
        for request, progress in repaired:
            if request.id in plan.preempted:
                self.preempted(request)
            elif (request.ending and has_no_room) or (request.blocks.exact_state and is_low):
                self._give_up(request, "short_of_blocks")
            elif request.ending and time.monotonic() > progress.until and self._has_heard(plan.number, progress):
                self._give_up(request, "late" if progress.until else "not_kept")
            elif self._has_windows:
                self._scratch.hold(request.blocks, self._tables(request))
        if n_answers or not scheduled:  # otherwise first tokens would wait
            self._plan_job(plan, step, [request for request, _ in repaired if request.repair.progress])
        self._plan_doubts(plan, step, [request for request, _ in repaired if request.repair.progress])
        plan.unrepaired, self._stopped = self._stopped, set()

    def preempted(self, request: ServedRequest) -> None:
        """The KV of a request is gone. Called before its next load begins, which borrows blocks for states: giving up
        the repair gives back all that are borrowed."""
        if request.repair.progress:
            self._give_up(request, "preempted")

    def computed(self, n: int) -> None:
        """So many more computations are done."""
        self._n_computing -= n

    def reported(self, results: Mapping[str, RepairResult]) -> Iterator[ServedRequest]:
        """Take note of how repairs have ended; yields the requests whose KV is exact now."""
        for name, result in results.items():
            request = self._repaired(name)
            if request is None or (progress := request.repair.progress) is None:
                continue
            if result.error:
                log.warning("request %s is not repaired: %s", name, result.error)
                self._give_up(request, "failed")
            elif progress.is_planned or (result.held and result.held.step >= progress.since):  # or it has begun anew
                self._complete(request, progress, result)
                yield request

    def passed(self, margins: Mapping[str, float]) -> None:
        """Take note of tokens that the model was in doubt about, or nearly, and that were not held."""
        for name, margin in margins.items():
            request = self._repaired(name)
            if request and (progress := request.repair.progress):
                self._doubts.passed(request, progress, margin)

    def _repaired(self, name: str) -> ServedRequest | None:
        """The request of this name that is repaired. One that has ended may have the name of one that is known."""
        named = (self._requests.known.get(name), self._requests.ended.get(name))
        return next((request for request in named if request and request.repair.progress), None)

    def goes_on(self, request: ServedRequest) -> bool:
        """A request ends; returns whether it is repaired on, for which its blocks have to be kept."""
        progress = request.repair.progress
        if not progress:
            return False
        is_audited = request.repair.is_audited
        after_s = AUDIT_S if is_audited else self._after_s if request.terms.repair != "off" else 0.0
        waits = not is_audited and request.terms.repair == "idle" and not self._is_idle
        is_whole = request.request.num_computed_tokens >= request.request.num_prompt_tokens
        if is_whole and after_s and not waits:
            progress.until = time.monotonic() + after_s
        elif not is_whole or self._has_heard(self._n_steps, progress):
            self._give_up(request, "not_kept")
            return False
        # Otherwise the answer's last token may have been held, of which the workers have yet to report.
        return True

    def clear(self) -> None:
        """Give up the repairs of requests that have ended, whose blocks keep vLLM from resetting its prefix cache."""
        for request in self._requests.ended.values():
            if request.repair.progress:
                self._give_up(request, "cleared")

    def _plan_job(self, plan: StepPlan, step: SchedulerOutput, repaired: list[ServedRequest]) -> None:
        modes = {"always", "idle"} if self._is_idle else {"always"}
        ready = [request for request in repaired if self._is_ready(request, step.num_scheduled_tokens, modes)]
        n_left = self._doubts.max_tokens - step.total_num_scheduled_tokens
        # An idle device computes one at a time. Otherwise work would pile up, for which the next request would wait.
        if not ready or n_left <= 0 or (self._n_computing and not step.num_scheduled_tokens):
            return
        request = max(ready, key=_priority)
        progress, n_prompt = request.repair.progress, request.request.num_prompt_tokens
        assert progress
        left = progress.left(request.computed_end)
        n_tokens = self._pace.take(left, n_left, at_once=request.repair.is_audited)
        if not n_tokens:
            return
        if (states := self._states.of_repair(request.blocks)) and left.start < states.shown_end:
            n_tokens = min(n_tokens, states.shown_end - left.start)  # no state is seen within a forward
        # For an audit, the model first predicts behind the prompt from blended KV.
        asks = request.repair.is_audited and not progress.has_begun and not states
        span = Span(left.start, left.start + n_tokens)
        tables = self._scratch.complete(request.blocks, self._tables(request))
        if (
            self._lacks_blocks(span, tables)
            or (asks and self._lacks_blocks(Span(n_prompt - 1, n_prompt), tables))
            or (not request.ending and self._states.lacks_live(tables, request.computed_end))
        ):
            self._give_up(request, "freed_blocks")
        else:
            n_scheduled = step.num_scheduled_tokens.get(request.id, 0)
            plan.repair = self._job(request, progress, span, tables, asks=asks, n_scheduled=n_scheduled)
            self._n_computing += 1

    def _plan_doubts(self, plan: StepPlan, step: SchedulerOutput, repaired: Sequence[ServedRequest]) -> None:
        for request in repaired:
            progress = request.repair.progress
            assert progress
            span = self._doubts.watched(step, request, progress, for_audits=self._states.are_needed)
            if span is None:
                continue
            blocks = self._new_blocks(request, progress, span)
            if blocks is None:
                self._give_up(request, "freed_blocks")
            else:
                self._doubts.watch(plan, request, progress, span, blocks, self._states.of_repair(request.blocks))

    def _new_blocks(self, request: ServedRequest, progress: Progress, span: Span) -> list[Blocks] | None:
        """The blocks in each block table that the workers do not know; None if vLLM has freed some that are needed."""
        sizes = self._scratch.tables.block_sizes
        sent = progress.sent.n_blocks if progress.sent else [0] * len(sizes)
        if not self._has_windows and all(n * size >= span.end for n, size in zip(sent, sizes, strict=True)):
            return [NO_BLOCKS] * len(sizes)  # as in most steps, of which each would read long tables
        tables = self._scratch.complete(request.blocks, self._tables(request))
        if self._lacks_blocks(span, tables) or self._states.lacks_live(tables, span.end):
            return None
        return [np.asarray(table[n:], np.int64) for table, n in zip(tables, sent, strict=True)]

    def _has_heard(self, step: int, progress: Progress) -> bool:
        """Whether the workers have reported, by this step, what became of the last token that they looked at."""
        return not progress.last_watched or step > progress.last_watched + REPORT_STEPS

    def _is_ready(self, request: ServedRequest, scheduled: Collection[str], modes: Collection[str]) -> bool:
        """Whether a repair can go on in a step that computes these requests, for repairs of these modes."""
        progress, has_ended = request.repair.progress, request.ending is not None
        left = progress.left(request.computed_end) if progress else Span(0, 0)
        if progress is None or progress.is_planned or (not _knows_all(request) and len(left) < MIN_TOKENS_UNKNOWN):
            return False
        if not has_ended and (request.id not in scheduled or not request.is_answering):
            return False
        mode = request.terms.repair
        if not has_ended and self._doubts.is_too_long(request, left):
            mode = "idle" if self._pace.limits.spares_others else "always"
        if request.repair.is_audited and (has_ended or mode != "off"):
            return True
        # An idle repair of an answer that has ended would slow down others' answers.
        if mode == "idle" and (scheduled if has_ended else request.request.max_tokens <= SHORT_ANSWER_TOKENS):
            return False
        return mode in modes

    @property
    def _is_idle(self) -> bool:
        """Whether no request waits or is computed, and few are answered; some engines spare all but the repaired."""
        known = self._requests.known.values()
        if self._pace.limits.spares_others and not all(map(_is_repaired, known)):
            return False
        return len(known) <= MAX_ANSWERS and all(request.is_answering for request in known)

    @property
    def _has_room(self) -> bool:
        """Whether there are free blocks for each request that waits."""
        known = self._requests.known.values()
        waiting = (request.request.num_tokens for request in known if not request.blocks.are_allocated)
        return self._scratch.has_room(max(waiting, default=0))

    def _tables(self, request: ServedRequest) -> Tables:
        """The blocks that vLLM has of a request."""
        return request.blocks.kept or self._scratch.blocks.of(request.id)

    def _lacks_blocks(self, span: Span, tables: Tables) -> bool:
        """Whether vLLM has freed blocks that the tokens write, or attend to."""
        of_tables = zip(tables, self._scratch.tables.block_sizes, self._scratch.tables.windows, strict=True)
        return any(
            len(table) * size < span.end
            or NULL_BLOCK in table[(window.begin(span.start) if window else 0) // size : -(-span.end // size)]
            for number, (table, size, window) in enumerate(of_tables)
            if number not in self._scratch.tables.of_states
        )

    def _job(
        self, request: ServedRequest, progress: Progress, span: Span, tables: Tables, *, asks: bool, n_scheduled: int
    ) -> RepairJob:
        """``n_scheduled``: how many tokens of the request the step computes."""
        is_first, tokens = not progress.has_begun, request.request.all_token_ids
        progress.has_begun, progress.exact_end = True, span.end
        progress.n_planned += len(span)
        self._counters["tokens_repaired"] += len(span)
        progress.is_planned = span.end == request.computed_end and _knows_all(request)
        n_prompt = request.request.num_prompt_tokens
        of_tables = self._scratch.tables
        ends = [max(span.end, n_prompt) if asks else span.end] * len(tables)
        for number in of_tables.of_states:
            ends[number] = request.computed_end + n_scheduled
        sized = zip(tables, of_tables.block_sizes, ends, strict=True)
        return RepairJob(
            request=request.id,
            span=span,
            tokens=np.asarray(tokens[span.start : span.end + 1], np.uint32),
            blocks=tuple(np.asarray(table[: -(-end // size)], np.int64) for table, size, end in sized),
            prompt_tokens=n_prompt,
            compares=self.audits.are_possible and is_plain(request.request.sampling_params),
            is_first=is_first,
            asks=tokens[n_prompt - 1] if asks else None,
            is_last=progress.is_planned,
            states=self._states.of_repair(request.blocks),
        )

    def _complete(self, request: ServedRequest, progress: Progress, result: RepairResult) -> None:
        """All KV of a request is what the model alone computes: vLLM finds its blocks as such."""
        first, tables = request.first_approximate, self._scratch.complete(request.blocks, self._tables(request))
        # Until the answer went on from exact states, vLLM has kept approximate ones.
        exact_end = result.held.position if result.held else progress.exact_end
        tables = self._states.exact_tables(request.blocks, tables, exact_end)
        # All but those of a hold were counted when they were planned.
        self._counters.update({"requests_repaired": 1, "tokens_repaired": max(0, result.tokens - progress.n_planned)})
        self._count_agreement(result)
        if result.audit:
            self.audits.end(request, result.audit)
        # Behind these tokens of the answer one more was sampled, and the first one behind exact KV comes then.
        exact_from = max(0, progress.exact_end - request.request.num_prompt_tokens) + 2
        if result.held:
            exact_from = self._doubts.held(request, result.held)
        differing = result.differing[:MAX_SPANS]
        request.repair.outcome = RepairOutcome(result.tokens, exact_from, result.compared, differing)
        request.kv.repaired()
        request.hashes.restore()
        assert first is not None
        self._scratch.blocks.cache_anew(request.request, tables, first, request.computed_end)
        self._stop(request)

    def _count_agreement(self, result: RepairResult) -> None:
        differing, start = np.asarray(result.differing), 0
        for end in (*BANDS, result.compared):
            if start >= result.compared:
                break
            last = min(end, result.compared)
            band = f"{start + 1}-{end}" if end in BANDS else f"{start + 1}-"
            self._counters[f"answer_tokens_compared_{band}"] += last - start
            self._counters[f"answer_tokens_differing_{band}"] += int(((differing >= start) & (differing < last)).sum())
            start = end

    def _give_up(self, request: ServedRequest, reason: str) -> None:
        if request.terms.repair != "off" or request.repair.is_audited:  # otherwise none was wanted
            self._counters[f"repairs_ended_{reason}"] += 1
        self._stop(request)

    def _stop(self, request: ServedRequest) -> None:
        request.repair.progress = None
        self._states.give_back(request.blocks)
        self._stopped.add(request.id)


def _knows_all(request: ServedRequest) -> bool:
    """Whether every token is known whose KV was computed: of a speculating engine, only after a pause."""
    return request.ending is not None or request.computed_end == request.request.num_computed_tokens


def _is_repaired(request: ServedRequest) -> bool:
    return request.repair.progress is not None and request.terms.repair != "off"


def _priority(request: ServedRequest) -> tuple[bool, float, int]:
    """The greatest comes first: audits, then where the model was most in doubt, then the answer that has most tokens to
    come."""
    to_come = 0 if request.ending else request.request.max_tokens - request.request.num_output_tokens
    margin = request.repair.progress.margin if request.repair.progress else math.inf
    return request.repair.is_audited, -margin, to_come
