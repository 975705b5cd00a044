"""Repairs of approximate KV, while the answer behind it is written and for a while after: what each step computes."""

import logging
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
from vllm.v1.core.sched.output import SchedulerOutput

from blendhub.core.spans import Span
from blendhub.outcome.report import MAX_SPANS, RepairOutcome
from blendhub.vllm.messages import NULL_BLOCK, RepairJob, RepairResult, StepPlan
from blendhub.vllm.scheduler.audits import Audits
from blendhub.vllm.scheduler.blocks.request_blocks import Tables
from blendhub.vllm.scheduler.blocks.scratch import Scratch
from blendhub.vllm.scheduler.repair_pace import RepairPace
from blendhub.vllm.scheduler.request_state import RequestState
from blendhub.vllm.settings import Settings

log = logging.getLogger(__name__)
MOST_ANSWERS = 4
"""With more answers under way, an engine is not idle."""
SHORT_ANSWER = 16
"""An answer of at most so many tokens ends before its repair does: a repair beside it would only slow it down."""
AUDIT_S = 60.0
"""How long an audit may go on behind the end of the answer."""
MANY = 64
"""While tokens are under way that are not known yet, no fewer are repaired: it would not be the last time."""
BANDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""The last answer tokens of the bands in which agreement is counted; all later tokens are in one more band."""


class Repair:
    """The repair of one request."""

    def __init__(self, state: RequestState) -> None:
        assert state.first_approximate is not None
        self.state = state
        self.exact_end = state.first_approximate
        """All tokens before this one are exact, or will be with what was planned."""
        self.has_begun = False
        self.is_planned = False
        """Whether everything was planned to be computed; the workers have yet to report that it was."""
        self.kept: Tables | None = None
        """The blocks of a request that has ended."""
        self.until = 0.0
        """If the request has ended: when it is given up."""

    @property
    def computed_end(self) -> int:
        """The end of the tokens whose KV earlier steps have computed, as far as the tokens are known."""
        return min(self.state.request.num_computed_tokens, self.state.request.num_tokens)

    @property
    def left(self) -> Span:
        """What is left to compute; the last token once more, if it was not known to be the last."""
        return Span(min(self.exact_end, self.computed_end - 1), self.computed_end)

    @property
    def knows_all(self) -> bool:
        """Whether every token is known whose KV was computed: of a speculating engine, only after a pause."""
        return self.kept is not None or self.computed_end == self.state.request.num_computed_tokens

    @property
    def asks(self) -> bool:
        """Whether its next job predicts behind the prompt from blended KV, before anything is repaired."""
        return self.state.is_audited and not self.has_begun

    @property
    def priority(self) -> tuple[bool, int]:
        """The greatest comes first: audits, and then the answer that has most tokens to come."""
        request = self.state.request
        to_come = 0 if self.kept is not None else request.max_tokens - request.num_output_tokens
        return self.state.is_audited, to_come


class Repairs:
    """All methods are called by the scheduler's thread; none waits."""

    def __init__(
        self,
        settings: Settings,
        audits: Audits,
        pace: RepairPace,
        most_tokens: int,
        scratch: Scratch,
        requests: Mapping[str, RequestState],
        counters: "Counter[str]",
    ) -> None:
        """``most_tokens``: vLLM's token budget of a step. ``requests``: those of the engine, now and later."""
        self.audits = audits
        self._after_s = settings.repair_after_s
        self._pace = pace
        self._most = most_tokens
        self._scratch = scratch
        self._requests = requests
        self._counters = counters
        self._repairs: dict[str, Repair] = {}
        self._has_windows = scratch.tables.shortest_window is not None
        self._over: list[tuple[RequestState, Tables]] = []
        self._ended: set[str] = set()
        """The requests whose repair has ended since the last plan."""

    @property
    def is_busy(self) -> bool:
        """Whether blocks of requests that have ended are kept."""
        return bool(self._over) or any(repair.kept is not None for repair in self._repairs.values())

    def add(self, state: RequestState) -> None:
        """Note that a request has its KV; it is repaired if some of that is approximate. May be called again."""
        if state.first_approximate is None or not state.is_repairable or state.id in self._repairs:
            return
        if self.audits.wants(state):
            state.is_audited = True
            self.audits.begun(state)
        if state.is_audited or state.terms.repair != "off":
            self._repairs[state.id] = Repair(state)

    def plan(self, plan: StepPlan, step: SchedulerOutput) -> None:
        """Have the step compute tokens of one request anew."""
        scheduled, n_answers = step.num_scheduled_tokens, 0
        if self._repairs:
            states = [self._requests.get(name) for name in scheduled]
            n_answers = sum(state is not None and state.is_answering for state in states)
        self._pace.begin_step(n_answers, only_answers=n_answers == len(scheduled))
        is_short = self.is_busy and (self._scratch.is_short or not self._has_room)
        for name, repair in list(self._repairs.items()):
            if name in plan.preempted:
                self._give_up(repair, "preempted")
            elif repair.kept is not None and is_short:
                self._give_up(repair, "short_of_blocks")
            elif repair.kept is not None and time.monotonic() > repair.until:
                self._give_up(repair, "late")
            elif self._has_windows:
                self._scratch.hold(name, self._tables(repair))
        if n_answers or not scheduled:  # otherwise first tokens would wait
            self._plan_repair(plan, step)
        plan.unrepaired, self._ended = self._ended, set()

    def _plan_repair(self, plan: StepPlan, step: SchedulerOutput) -> None:
        scheduled = step.num_scheduled_tokens
        modes = {"always", "idle"} if self._is_idle else {"always"}
        ready = [repair for repair in self._repairs.values() if self._is_ready(repair, scheduled, modes)]
        if not ready:
            return
        repair = max(ready, key=lambda repair: repair.priority)
        left, most = repair.left, self._most - step.total_num_scheduled_tokens
        n_tokens = self._pace.take(left, most, at_once=repair.state.is_audited) if most > 0 else 0
        if not n_tokens:
            return
        span = Span(left.start, left.start + n_tokens)
        tables = self._scratch.complete(repair.state.id, self._tables(repair))
        asked = Span(repair.state.request.num_prompt_tokens - 1, repair.state.request.num_prompt_tokens)
        if self._lacks_blocks(span, tables) or (repair.asks and self._lacks_blocks(asked, tables)):
            self._give_up(repair, "freed_blocks")
        else:
            plan.repair = self._job(repair, span, tables)

    def reported(self, results: Mapping[str, RepairResult]) -> Iterator[RequestState]:
        """Take note of how repairs have ended; yields the requests whose KV is exact now."""
        for name, result in results.items():
            repair = self._repairs.get(name)
            if repair and result.error:
                log.warning("request %s is not repaired: %s", name, result.error)
                self._give_up(repair, "failed")
            elif repair and repair.is_planned:  # otherwise it has begun anew
                state, tables = repair.state, self._scratch.complete(name, self._tables(repair))
                self._end(repair)
                self._counters.update({"requests_repaired": 1, "tokens_repaired": result.tokens})
                self._count_agreement(result)
                if result.audit:
                    state.audit = result.audit
                    self.audits.ended(state, result.audit)
                # Behind these tokens of the answer one more was sampled, and the first one behind exact KV comes then.
                n_answered = max(0, repair.exact_end - state.request.num_prompt_tokens)
                differing = result.differing[:MAX_SPANS]
                state.repair = RepairOutcome(result.tokens, n_answered + 2, result.compared, differing)
                state.repaired(self._scratch.blocks, tables, repair.computed_end)
                yield state

    def keep(self, state: RequestState, tables: Tables) -> bool:
        """A request has ended; returns whether its blocks are kept until it is repaired."""
        repair = self._repairs.get(state.id)
        if not repair:
            return False
        after_s = AUDIT_S if state.is_audited else self._after_s
        waits = not state.is_audited and state.terms.repair == "idle" and not self._is_idle
        if not after_s or waits or state.request.num_computed_tokens < state.request.num_prompt_tokens:
            self._give_up(repair, "not_kept")
            return False
        repair.kept, repair.until = tables, time.monotonic() + after_s
        return True

    def take_over(self) -> list[tuple[RequestState, Tables]]:
        """The requests that have ended and are not repaired any more, with the blocks that were kept."""
        over, self._over = self._over, []
        return over

    def clear(self) -> None:
        """Give up the repairs of requests that have ended, whose blocks keep vLLM from resetting its prefix cache."""
        for repair in list(self._repairs.values()):
            if repair.kept is not None:
                self._give_up(repair, "cleared")

    def _is_ready(self, repair: Repair, scheduled: Collection[str], modes: Collection[str]) -> bool:
        """Whether the repair can go on in a step that computes these requests, for repairs of these modes."""
        state, is_over = repair.state, repair.kept is not None
        if repair.is_planned or (not repair.knows_all and len(repair.left) < MANY):
            return False
        if not is_over and (state.id not in scheduled or not state.is_answering):
            return False
        if state.is_audited and (is_over or state.terms.repair != "off"):
            return True
        # An idle repair of an answer that has ended would slow down others' answers.
        if state.terms.repair == "idle" and (scheduled if is_over else state.request.max_tokens <= SHORT_ANSWER):
            return False
        return state.terms.repair in modes

    @property
    def _is_idle(self) -> bool:
        """Whether no request waits or is computed, and few are answered."""
        requests = self._requests.values()
        return len(requests) <= MOST_ANSWERS and all(state.is_answering for state in requests)

    @property
    def _has_room(self) -> bool:
        """Whether there are free blocks for each request that waits."""
        waiting = (state.request.num_tokens for state in self._requests.values() if not state.is_scheduled)
        return self._scratch.has_room(max(waiting, default=0))

    def _tables(self, repair: Repair) -> Tables:
        """The blocks that vLLM has of a request."""
        return self._scratch.blocks.of(repair.state.id) if repair.kept is None else repair.kept

    def _lacks_blocks(self, span: Span, tables: Tables) -> bool:
        """Whether vLLM has freed blocks that the tokens write, or attend to."""
        of_tables = zip(tables, self._scratch.tables.block_sizes, self._scratch.tables.windows, strict=True)
        return any(
            len(table) * size < span.end
            or NULL_BLOCK in table[(window.begin(span.start) if window else 0) // size : -(-span.end // size)]
            for table, size, window in of_tables
        )

    def _job(self, repair: Repair, span: Span, tables: Tables) -> RepairJob:
        state, request = repair.state, repair.state.request
        is_first, asks = not repair.has_begun, repair.asks
        repair.has_begun, repair.exact_end = True, span.end
        repair.is_planned = span.end == repair.computed_end and repair.knows_all
        sizes = self._scratch.tables.block_sizes
        n_prompt = request.num_prompt_tokens
        end = max(span.end, n_prompt) if asks else span.end
        blocks = (table[: -(-end // size)] for table, size in zip(tables, sizes, strict=True))
        return RepairJob(
            request=state.id,
            span=span,
            tokens=np.asarray(request.all_token_ids[span.start : span.end + 1], np.uint32),
            blocks=tuple(np.asarray(table, np.int64) for table in blocks),
            prompt_tokens=n_prompt,
            compares=self.audits.are_possible and says_the_likeliest(request.sampling_params),
            is_first=is_first,
            asks=request.all_token_ids[n_prompt - 1] if asks else None,
            is_last=repair.is_planned,
        )

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

    def _give_up(self, repair: Repair, why: str) -> None:
        self._counters[f"repairs_ended_{why}"] += 1
        self._end(repair)

    def _end(self, repair: Repair) -> None:
        del self._repairs[repair.state.id]
        self._ended.add(repair.state.id)
        if repair.kept is not None:
            self._over.append((repair.state, repair.kept))


def says_the_likeliest(params: Any) -> bool:
    """Whether an answer's tokens are the model's likeliest ones, as nothing but the model decides."""
    return (
        params is not None
        and params.temperature == 0
        and not (params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1)
        and not (params.logit_bias or params.allowed_token_ids or params.bad_words or params.min_tokens)
        and not params.structured_outputs
        and set(params.extra_args or ()) <= {"kv_transfer_params"}
    )
