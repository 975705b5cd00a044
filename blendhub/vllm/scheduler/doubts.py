"""Doubt: the tokens that workers look at before a step is sampled, and hold if the model is unsure of them."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from vllm.v1.core.sched.output import SchedulerOutput

from blendhub.core.spans import Span
from blendhub.outcome.report import DoubtOutcome
from blendhub.vllm.costs import Costs
from blendhub.vllm.messages import DoubtJob, HeldToken, RepairStates, StepPlan
from blendhub.vllm.scheduler.repair_pace import GUESSED_COST
from blendhub.vllm.scheduler.request.repair import Progress, Sent
from blendhub.vllm.scheduler.request.served_request import ServedRequest
from blendhub.vllm.scheduler.request.terms import is_plain
from blendhub.vllm.settings import Settings
from blendhub.vllm.watching.stats import Times


class Doubts:
    """Called by the scheduler's thread; waits for nothing."""

    def __init__(
        self, settings: Settings, costs: Costs | None, max_tokens: int, counters: "Counter[str]", times: Times
    ) -> None:
        self.max_tokens = max_tokens
        """vLLM's token budget of a step."""
        self._cost, prefill = (costs.recompute, costs.prefill) if costs else (GUESSED_COST, GUESSED_COST)
        prefill_s = prefill.seconds(prefill.sum([Span(0, max_tokens)]))
        self.pause_s = prefill_s if settings.doubt_pause_s is None else settings.doubt_pause_s
        self._counters = counters
        self._times = times

    def is_too_long(self, request: ServedRequest, left: Span) -> bool:
        """Whether what is left of a repair takes longer than a step may be held: it has to be repaired before."""
        return request.terms.doubt > 0 and self._seconds(left) > self.pause_s

    def watched(
        self, step: SchedulerOutput, request: ServedRequest, progress: Progress, *, for_audits: bool
    ) -> Span | None:
        """The approximate tokens of a request, up to the last one of this step; None if its token is not looked at.

        ``for_audits``: whether an audit needs to see the first token's prediction.
        """
        n_scheduled = step.num_scheduled_tokens.get(request.id, 0)
        is_seen = request.terms.doubt or (for_audits and request.repair.is_audited and not request.has_begun_to_answer)
        if not is_seen or not n_scheduled or progress.is_planned or request.ending:
            return None
        if progress.has_begun and not progress.sent:  # what was planned may have failed
            return None
        n_known = request.request.num_tokens
        end = request.request.num_computed_tokens + n_scheduled
        # Behind a chunk of the prompt nothing is sampled. If vLLM plans one step ahead, one token is not known yet.
        return Span(min(progress.exact_end, end - 1), end) if n_known <= end <= n_known + 1 else None

    def watch(
        self,
        plan: StepPlan,
        request: ServedRequest,
        progress: Progress,
        span: Span,
        blocks: Sequence[npt.NDArray[np.int64]],
        states: RepairStates | None,
    ) -> None:
        """Have the workers look at the token behind this span. ``blocks``: those in each table that they lack.
        ``states``: of the repair."""
        sent = progress.sent or Sent(span.start, [0] * len(blocks))
        sampling = request.request.sampling_params
        plan.pause_s = self.pause_s
        plan.doubts.append(
            DoubtJob(
                request=request.id,
                margin=request.terms.doubt,
                span=span,
                tokens=np.asarray(request.request.all_token_ids[sent.end : span.end - 1], np.uint32),
                blocks=tuple(blocks),
                is_first=progress.sent is None,
                seconds=self._seconds(span),
                prompt_tokens=request.request.num_prompt_tokens,
                compares=is_plain(sampling),
                # Behind a mask of structured output, nothing could be compared.
                is_audited=request.repair.is_audited and bool(sampling and not sampling.structured_outputs),
                states=states,
            )
        )
        if progress.sent is None:
            progress.since = plan.number
        progress.sent = Sent(span.end - 1, [n + len(new) for n, new in zip(sent.n_blocks, blocks, strict=True)])
        progress.last_watched = plan.number

    def passed(self, request: ServedRequest, progress: Progress, margin: float) -> None:
        """Take note of a token that the model was in doubt about, or nearly, and that was not held."""
        progress.margin = min(progress.margin, margin)
        if margin < request.terms.doubt:
            self._counters["tokens_doubted"] += 1
            outcome = request.repair.doubt or DoubtOutcome()
            request.repair.doubt = DoubtOutcome(passed=outcome.passed + 1)

    def held(self, request: ServedRequest, held: HeldToken) -> int:
        """Take note of a token that was held; returns the number of the answer's token, counted from 1."""
        number = held.position - request.request.num_prompt_tokens + 1
        if held.position >= request.request.num_tokens:  # behind an answer that had ended
            return number
        self._counters["answers_held"] += 1
        self._counters["answers_held_differing"] += not held.agrees
        self._times.add("held_seconds", held.seconds)
        passed = request.repair.doubt.passed if request.repair.doubt else 0
        request.repair.doubt = DoubtOutcome(number, held.margin, held.agrees, held.kl, held.seconds, passed)
        return number

    def _seconds(self, span: Span) -> float:
        return self._cost.seconds(self._cost.sum([span]))
