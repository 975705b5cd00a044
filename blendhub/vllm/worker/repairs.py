"""Repairs: approximate KV is computed anew, in its place, while the answer behind it is written."""

import numpy as np
import torch

from blendhub.core.spans import Span
from blendhub.core.tokens import Tokens
from blendhub.outcome.report import AuditOutcome
from blendhub.vllm.messages import RepairJob, RepairResult
from blendhub.vllm.model.recompute_set import RecomputeSet, RequestTokens
from blendhub.vllm.worker.audit import compared
from blendhub.vllm.worker.forwards import failing
from blendhub.vllm.worker.recompute import BlendContext, HostCopy

ROWS = 32
"""The most tokens whose predictions are in memory at a time."""


class Repair:
    """What is known on this rank about the repair of one request."""

    def __init__(self, error: Exception | None) -> None:
        self.n_tokens = 0
        self.error = error
        self.is_over = False
        self.blended: torch.Tensor | None = None
        """For an audit: what the model predicts behind the prompt from blended KV."""
        self.audit: HostCopy | None = None
        """Whether the likeliest first token is the same from exact KV, and the divergence."""
        self.same: list[tuple[int, HostCopy]] = []
        """Whether tokens of the answer are the likeliest ones; and the number of the first of them."""

    def fail(self, error: Exception) -> None:
        self.error = error

    def result(self) -> RepairResult | None:
        """The result, once the repair has ended and the host has all numbers."""
        if self.error:
            return RepairResult(error=f"{type(self.error).__name__}: {self.error}")
        audit = self.audit.numbers() if self.audit else None
        compared, differing = 0, list[int]()
        for first, copy in self.same:
            if (same := copy.numbers()) is None:
                return None
            compared += len(same)
            differing += (first + np.flatnonzero(~same)).tolist()
        if not self.is_over or (self.audit and audit is None):
            return None
        outcome = None if audit is None else AuditOutcome(agrees=bool(audit[0]), kl=float(audit[1]))
        return RepairResult(tokens=self.n_tokens, compared=compared, differing=tuple(differing), audit=outcome)


class Repairs:
    """All repairs of a rank. All ranks compute the same spans in the same steps, which the scheduler has planned.

    A step's repair is launched before its forward, and the engine's stream orders the two. So a request whose tokens
    are all repaired before the forward, up to its last computed one, goes on from exact KV.
    """

    def __init__(self, context: BlendContext) -> None:
        self._context = context
        self._repairs: dict[str, Repair] = {}
        self._computed: dict[str, HostCopy] = {}
        """For each request some number that the device computes last."""
        self._stopped: Exception | None = None

    def step(self, job: RepairJob, *, is_idle: bool) -> None:
        """Compute a span anew. All tokens before it are exact by now.

        ``is_idle``: the step computes nothing else, so it waits until the device has done the work of the last one.
        Otherwise work would pile up, for which the next request would wait.
        """
        if is_idle:
            for computed in self._computed.values():
                computed.wait()
        if job.is_first:
            self._repairs[job.request] = Repair(self._stopped)
        repair = self._repairs.get(job.request)
        if repair is None or repair.error:
            return  # the scheduler has yet to hear of the error
        with failing(self._context.ranks, [repair]):
            last = Span(job.prompt_tokens - 1, job.prompt_tokens)
            if job.asks is not None:
                asked = self._context.model.logits(self._hidden(job, last, np.array([job.asks], np.uint32)))
                repair.blended = None if asked is None else asked[0]
            hidden = self._hidden(job, job.span, job.tokens)
            self._computed[job.request] = HostCopy(hidden[-1:, :1])
            repair.n_tokens += len(job.span)
            repair.is_over = job.is_last
            first = max(job.span.start, last.start)
            behind = job.tokens[first + 1 - job.span.start :]
            n = len(behind) if job.compares else int(repair.blended is not None and first == last.start < job.span.end)
            for at in range(0, n, ROWS):
                begin = first + at
                predicted = self._context.model.logits(hidden[begin - job.span.start :][: min(ROWS, n - at)])
                if predicted is None:
                    continue
                if begin == last.start and repair.blended is not None:
                    repair.audit = HostCopy(compared(repair.blended, predicted[0]))
                if job.compares:
                    said = self._context.model.sent(behind[at : at + ROWS].astype(np.int64))
                    repair.same.append((begin - last.start, HostCopy(predicted.argmax(1) == said)))

    def stop(self, error: Exception) -> None:
        """Repair nothing until ``go_on``; what was repaired until now is lost."""
        self._stopped = error
        for repair in self._repairs.values():
            repair.fail(error)

    def go_on(self) -> None:
        self._stopped = None

    def is_computing(self, request: str) -> bool:
        """Whether the device still writes blocks of the request."""
        computed = self._computed.get(request)
        return computed is not None and computed.numbers() is None

    def forget(self, request: str) -> None:
        """The scheduler has given a repair up."""
        self._repairs.pop(request, None)

    def take_results(self) -> dict[str, RepairResult]:
        """The results since the last call."""
        self._computed = {name: copy for name, copy in self._computed.items() if copy.numbers() is None}
        results = {name: result for name, repair in self._repairs.items() if (result := repair.result())}
        for name in results:
            del self._repairs[name]
        return results

    def _hidden(self, job: RepairJob, span: Span, tokens: Tokens) -> torch.Tensor:
        placed = np.zeros(span.start + len(tokens), np.uint32)
        placed[span.start :] = tokens
        return self._context.model.forward(RecomputeSet([RequestTokens(placed, job.blocks, [span])]))
