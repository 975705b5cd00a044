"""Repairs: approximate KV is computed anew, in its place, while the answer behind it is written."""

from collections.abc import Sequence

import numpy as np
import torch

from blendhub.core.spans import Span
from blendhub.core.tokens import Tokens
from blendhub.outcome.report import AuditOutcome
from blendhub.vllm.messages import NULL_BLOCK, HeldToken, RepairJob, RepairResult, RepairStates
from blendhub.vllm.model.engine_model import EngineModel
from blendhub.vllm.model.recompute_set import Blocks, RecomputeSet, RequestTokens
from blendhub.vllm.model.states.state_path import StatePath
from blendhub.vllm.worker.audit import compared
from blendhub.vllm.worker.forwards import fail_on_error
from blendhub.vllm.worker.recompute import BlendContext, HostCopy

ROWS = 32
"""The most tokens whose predictions are in memory at a time."""


class Repair:
    """What is known on this rank about the repair of one request."""

    def __init__(self, model: EngineModel, prompt_tokens: int, *, compares: bool, error: Exception | None) -> None:
        """``compares``: whether tokens of the answer are compared with the likeliest ones."""
        self._model = model
        self._last = prompt_tokens - 1
        self._compares = compares
        self.n_tokens = 0
        self.error = error
        self.is_over = False
        self.blended: torch.Tensor | None = None
        """For an audit: what the model predicts behind the prompt from blended KV."""
        self.audit: HostCopy | None = None
        """Whether the likeliest first token is the same from exact KV, and the divergence."""
        self.same: list[tuple[int, HostCopy]] = []
        """Whether tokens of the answer are the likeliest ones; and the number of the first of them."""
        self.held: HeldToken | None = None
        """The token that waited for the end of the repair."""

    def computed(self, span: Span, tokens: Tokens, hidden: torch.Tensor) -> None:
        """A span was computed anew. ``tokens``: its own and the next one, if that is known; ``hidden``: its states."""
        self.n_tokens += len(span)
        first = max(span.start, self._last)
        behind = tokens[first + 1 - span.start :] if self._compares else tokens[:0]
        is_audited = self.blended is not None and first == self._last < span.end
        n = max(len(behind), int(is_audited))
        for at in range(0, n, ROWS):
            begin = first + at
            predicted = self._model.logits(hidden[begin - span.start :][: min(ROWS, n - at)])
            if predicted is None:
                continue
            if begin == self._last and self.blended is not None:
                self.audit = HostCopy(compared(self.blended, predicted[0]))
            if len(said := behind[at : at + ROWS]):
                same = predicted[: len(said)].argmax(1) == self._model.to_device(said.astype(np.int64))
                self.same.append((begin - self._last, HostCopy(same)))

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
        return RepairResult(
            tokens=self.n_tokens, compared=compared, differing=tuple(differing), audit=outcome, held=self.held
        )


class Repairs:
    """All repairs of a rank. All ranks compute the same spans in the same steps, which the scheduler has planned.

    A step's repair is launched before its forward, and the engine's stream orders the two. So a request whose tokens
    are all repaired before the forward, up to its last computed one, goes on from exact KV.
    """

    def __init__(self, context: BlendContext) -> None:
        self._context = context
        self._stopped: Exception | None = None

    def begin(self, prompt_tokens: int, *, compares: bool) -> Repair:
        return Repair(self._context.model, prompt_tokens, compares=compares, error=self._stopped)

    def compute(self, repair: Repair, job: RepairJob) -> HostCopy | None:
        """Compute a span anew. All tokens before it are exact by now. Returns some number that the device computes
        last; None if the repair has failed, of which the scheduler has yet to hear."""
        if repair.error:
            return None
        computed = None
        with fail_on_error(self._context.ranks, [repair]):
            if job.asks is not None:
                last = Span(job.prompt_tokens - 1, job.prompt_tokens)
                asked = self._context.model.logits(self._hidden(job, last, np.array([job.asks], np.uint32)))
                repair.blended = None if asked is None else asked[0]
            hidden = self._hidden(job, job.span, job.tokens)
            computed = HostCopy(hidden[-1:, :1])
            repair.computed(job.span, job.tokens, hidden)
            show_states(self._context.model, job.states, job.span.end)
            if job.is_last:  # what fails before leaves the answer as it is
                hand_over_states(self._context.model, job.states, job.blocks, job.span.end)
            repair.is_over = job.is_last
        return computed

    def stop(self, error: Exception | None) -> None:
        """Repair nothing from now on; None: repair again."""
        self._stopped = error

    def _hidden(self, job: RepairJob, span: Span, tokens: Tokens) -> torch.Tensor:
        placed = np.zeros(span.start + len(tokens), np.uint32)
        placed[span.start :] = tokens
        part = repaired_tokens(placed, job.blocks, span, job.states)
        return self._context.model.forward(RecomputeSet([part]))


def repaired_tokens(tokens: Tokens, blocks: Sequence[Blocks], span: Span, states: RepairStates | None) -> RequestTokens:
    """A span to compute anew behind exact KV, and in models with recurrent layers behind the states of the repair."""
    if states is None:
        return RequestTokens(tokens, blocks, [span])
    tables = [
        np.array([states.running[number]]) if number in states.running else table for number, table in enumerate(blocks)
    ]
    return RequestTokens(tokens, tables, [span], StatePath(span.start, span.end))


def show_states(model: EngineModel, states: RepairStates | None, end: int) -> None:
    """Tokens were computed anew up to ``end``: copy the states there for vLLM's prefix cache, if it is to have them."""
    if states and states.shown and states.shown_end == end:
        model.copy_states(states.shown, states.running)


def hand_over_states(model: EngineModel, states: RepairStates | None, blocks: Sequence[Blocks], end: int) -> None:
    """All tokens were computed anew, up to ``end``: have the request go on from the states of the repair.

    Where a block ends there, the next step begins in another one, to which vLLM has copied the state already, or will.
    """
    if states is None:
        return
    tables = {table: blocks[table][(end - 1) // model.block_sizes[table] :].tolist() for table in states.running}
    for live in zip(*tables.values(), strict=True):
        if NULL_BLOCK not in live:
            model.copy_states(dict(zip(tables, live, strict=True)), states.running)
