"""Doubt: where the model is unsure of a token behind approximate KV, the step is held until the KV is exact.

What this knows of a request grows with each job: blocks and tokens are sent once.
"""

import logging
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from blendhub.core.spans import Span
from blendhub.core.tokens import Tokens
from blendhub.vllm.messages import DoubtJob, HeldToken
from blendhub.vllm.model.recompute_set import RecomputeSet
from blendhub.vllm.model.sampling import Sampling
from blendhub.vllm.worker.audit import compared
from blendhub.vllm.worker.forwards import fail_on_error
from blendhub.vllm.worker.recompute import BlendContext
from blendhub.vllm.worker.repairs import Repair, hand_over_states, repaired_tokens, show_states

log = logging.getLogger(__name__)
NEAR = 2.0
"""With a margin of less than so many times that of doubt, the model is nearly in doubt."""
PARTS = 1_000_000
"""Ranks agree on margins in whole parts of a nat."""
SURE = 1_000
"""The margin where only one token is allowed, or nothing can be compared."""


class Watch:
    """The tokens and blocks of a request whose KV is approximate."""

    def __init__(self, job: DoubtJob) -> None:
        self._first = job.span.start
        self._tokens = [job.tokens]
        self._blocks = [[blocks] for blocks in job.blocks]
        self.is_exact = False
        """Whether all of its KV is exact now, of which the scheduler has yet to hear."""

    def add(self, job: DoubtJob) -> None:
        self._tokens.append(job.tokens)
        for known, new in zip(self._blocks, job.blocks, strict=True):
            if len(new):
                known.append(new)

    def tokens(self, end: int, last: int) -> Tokens:
        """The tokens before ``end``, of which the runner knows the last one; zeros where they are exact."""
        tokens = np.zeros(end, np.uint32)
        known = np.concatenate(self._tokens)[: end - 1 - self._first]
        tokens[self._first : self._first + len(known)] = known
        tokens[end - 1] = last
        return tokens

    @property
    def blocks(self) -> list[npt.NDArray[np.int64]]:
        return [np.concatenate(blocks) for blocks in self._blocks]


class Doubted(NamedTuple):
    """A token that the model is in doubt about."""

    job: DoubtJob
    row: int
    margin: float
    watch: Watch
    repair: Repair


class Doubts:
    """The tokens of one step. All ranks look at the same rows, and hold the step for the same tokens."""

    def __init__(self, context: BlendContext) -> None:
        self._context = context
        self._step, self._pause_s = 0, 0.0
        self._watched: list[tuple[DoubtJob, Watch, Repair]] = []

    def begin_step(self, step: int, pause_s: float) -> None:
        self._step, self._pause_s = step, pause_s
        self._watched = []

    def watch(self, job: DoubtJob, watch: Watch, repair: Repair) -> None:
        """Look at this token when the step is sampled. ``repair``: what was computed of the request before."""
        self._watched.append((job, watch, repair))

    def look(self, sampling: Sampling) -> dict[str, float]:
        """Hold the step for its tokens in doubt; returns the margins of those that are not held, or nearly in doubt."""
        watched, self._watched = self._watched, []
        if not watched:
            return {}
        rows = sampling.rows([job.request for job, _, _ in watched])
        for (job, _, repair), row in zip(watched, rows, strict=True):
            if job.is_audited and row is not None and job.span.end == job.prompt_tokens:
                repair.blended = sampling.logits[row].clone()
        parts = [PARTS * SURE] * len(watched)
        try:
            parts = self._margins(sampling, [row or 0 for row in rows], all(job.compares for job, _, _ in watched))
        except Exception:  # this rank has no opinion, and holds what the others do
            log.exception("BlendHub: the margins of tokens are not known")
        margins = [number / PARTS for number in self._context.ranks.least(parts)]
        doubted = [
            Doubted(job, row, margin, watch, repair)
            for (job, watch, repair), row, margin in zip(watched, rows, margins, strict=True)
            if row is not None and margin < NEAR * job.margin
        ]
        held, seconds = list[Doubted](), 0.0
        for token in sorted(doubted, key=lambda token: token.margin):
            is_held = token.margin < token.job.margin and not token.repair.error
            if is_held and seconds + token.job.seconds <= self._pause_s:
                held.append(token)
                seconds += token.job.seconds
        if held:
            self._hold(sampling, held)
        return {token.job.request: token.margin for token in doubted if not token.watch.is_exact}

    def _margins(self, sampling: Sampling, rows: Sequence[int], are_plain: bool) -> list[int]:
        """By how much the second token is less likely than the first one, in parts of a nat."""
        logits = sampling.logits if are_plain else sampling.processed()
        best = logits[self._context.model.to_device(np.array(rows, np.int64))].float().topk(2).values
        margins = (best[:, 0] - best[:, 1]).nan_to_num(SURE, SURE).clamp(0, SURE)
        parts: list[int] = (margins * PARTS).long().tolist()
        return parts

    def _hold(self, sampling: Sampling, held: Sequence[Doubted]) -> None:
        """Make the KV of these requests exact, and put the exact predictions in place. If that fails, their tokens are
        sampled as they are."""
        context, started = self._context, time.perf_counter()
        repairs = [token.repair for token in held]
        with fail_on_error(context.ranks, repairs):
            exact = context.model.logits(self._compute(held, sampling.last_tokens([token.row for token in held])))
            assert exact is not None, "a rank that samples has predictions"
            compared_with = []
            for token, prediction in zip(held, exact, strict=True):
                row = sampling.logits[token.row]
                # What structured output has masked stays so.
                prediction = torch.where(row.isneginf(), row, prediction[: len(row)].to(row.dtype))
                compared_with.append(compared(row, prediction))
                row.copy_(prediction)
            for token in held:
                hand_over_states(context.model, token.job.states, token.watch.blocks, token.job.span.end)
            outcomes = torch.stack(compared_with).tolist()
            seconds = time.perf_counter() - started
            for token, (agrees, kl) in zip(held, outcomes, strict=True):
                token.watch.is_exact = token.repair.is_over = True
                token.repair.held = HeldToken(self._step, token.job.span.end, token.margin, bool(agrees), kl, seconds)

    def _compute(self, held: Sequence[Doubted], last: Sequence[int]) -> torch.Tensor:
        """Compute what is approximate anew, in forwards that the requests share. Returns the last tokens' states."""
        model = self._context.model
        tokens = [token.watch.tokens(token.job.span.end, id) for token, id in zip(held, last, strict=True)]
        blocks = [token.watch.blocks for token in held]
        left = [token.job.span for token in held]
        states: dict[int, torch.Tensor] = {}
        while any(map(len, left)):
            pieces, room = dict[int, Span](), model.max_tokens
            for number, span in enumerate(left):
                n = min(len(span), room)
                if (copied := held[number].job.states) and span.start < copied.shown_end:
                    n = min(n, copied.shown_end - span.start)
                if n and len(pieces) < model.max_spans:
                    pieces[number], left[number] = Span(span.start, span.start + n), Span(span.start + n, span.end)
                    room -= n
            chosen = RecomputeSet(
                [repaired_tokens(tokens[at], blocks[at], span, held[at].job.states) for at, span in pieces.items()]
            )
            # The step's own states may be in memory of graphs.
            hidden = model.forward(chosen, replays=False)
            for part, (number, span) in enumerate(pieces.items()):
                of_span = hidden[model.to_device(chosen.places(part))]
                held[number].repair.computed(span, tokens[number][span.start : span.end + 1], of_span)
                states[number] = of_span[-1]
                show_states(model, held[number].job.states, span.end)
        return torch.stack([states[number] for number in range(len(held))])
