"""Forwards that serve all requests of a worker that are blending, within the step's budget."""

import itertools
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from blendhub.core.errors import BlendHubError
from blendhub.core.spans import Span, total
from blendhub.vllm.model.attention_probe import AttentionQuery
from blendhub.vllm.model.pages import read_as_computed
from blendhub.vllm.model.recompute_set import RecomputeSet
from blendhub.vllm.ranks import RankFailure, Ranks
from blendhub.vllm.spans import cut
from blendhub.vllm.worker.recompute import Blend, BlendContext, Computed, HostCopy

log = logging.getLogger(__name__)


class Forwards:
    """Runs forwards. Work is counted in tokens through the whole model; a probed token counts for its part of it."""

    def __init__(self, context: BlendContext) -> None:
        self._context = context

    def step(self, blends: Sequence[Blend], budget: int) -> int:
        """Take requests forward within the budget, in the order of their arrival; returns what it cost.

        Requests wait for the scores of their probes, on all ranks, but no step does. Each round computes a share of
        each request's work: what queries attend to first, and whole, since they are few tokens.
        """
        spent = 0
        while True:
            if waiting := [blend for blend in blends if blend.is_waiting]:
                have_scores = self._context.ranks.least([blend.has_scores for blend in waiting])
                for blend in itertools.compress(waiting, have_scores):
                    with fail_on_error(self._context.ranks, [blend]):
                        blend.go_on()
            ready = [blend for blend in blends if blend.is_ready]
            if not ready or spent >= budget:
                return spent
            if queries := [blend for blend in ready if blend.work and blend.work.query]:
                spent += self._attend(queries, budget - spent)
            else:
                for layer, batches in self._batches(ready, budget - spent):
                    spent += sum(self._cost(spans, layer) for _, spans in batches)
                    self._compute(batches, layer)

    def _batches(
        self, blends: Sequence[Blend], budget: int
    ) -> Iterator[tuple[int, Sequence[tuple[Blend, list[Span]]]]]:
        """The forwards of a round: one for the whole model (0), and one for each layer that is probed.

        Each request computes the first tokens of its work, as many as it is given, within the limits of a forward.
        """
        model, works = self._context.model, [blend.work for blend in blends if blend.work]
        costs = shares([self._cost(work.spans, work.layer) for work in works], budget)
        for layer in sorted({work.layer for work in works}):
            alike = [number for number, work in enumerate(works) if work.layer == layer]
            part, whole = self._weight(layer)
            needs = [min(total(works[number].spans), costs[number] * whole // part) for number in alike]
            n_tokens = shares(needs, model.max_tokens)
            firsts = [cut(works[number].spans, n) for number, n in zip(alike, n_tokens, strict=True)]
            n_spans = shares([len(spans) for spans in firsts], model.max_spans)
            batches = [(blends[number], spans[:n]) for number, spans, n in zip(alike, firsts, n_spans, strict=True)]
            if taken := [(blend, spans) for blend, spans in batches if spans]:
                yield layer, taken

    def _compute(self, batches: Sequence[tuple[Blend, list[Span]]], layer: int) -> None:
        """One forward: through the whole model (0), or up to a probed layer."""
        blends = [blend for blend, _ in batches]
        chosen = RecomputeSet([blend.part(spans) for blend, spans in batches])
        scores, started = None, time.perf_counter()
        with fail_on_error(self._context.ranks, blends):
            if layer:
                scores = HostCopy(self._score(chosen, layer))
            else:
                self._context.model.forward(chosen)
        # Also behind a forward that has failed in the middle.
        if self._context.is_beside_others or any(blend.job.decision.maps for blend in blends):
            with fail_on_error(self._context.ranks, blends):
                written = HostCopy(torch.zeros(1, device=self._context.model.device))
                for blend in blends:
                    blend.written = written
        second = (time.perf_counter() - started) / len(chosen)
        for number, (blend, spans) in enumerate(batches):
            if not blend.error:
                with fail_on_error(self._context.ranks, [blend]):
                    blend.go_on(Computed(spans, chosen, number, total(spans) * second, scores))

    def _score(self, chosen: RecomputeSet, layer: int) -> torch.Tensor:
        """Probe tokens, and keep the computed KV in the pages."""
        context = self._context
        fresh = context.model.forward_until(layer, chosen)
        slots = context.model.slots(chosen, layer)
        with torch.inference_mode():
            stored = read_as_computed(context.model, context.layers[layer], slots)
            scores = context.ranks.sum(context.ranks.together(lambda: context.selector.score(fresh, stored)))
            # The probed layer's KV was computed from complete layers, so it is better than the stored KV.
            context.model.write(layer, *fresh, slots)
        return scores

    def _attend(self, blends: Sequence[Blend], budget: int) -> int:
        """Find what the ends of prompts attend to, in one forward: of the first requests, as many as the budget pays
        for, and one at least."""
        taken: list[tuple[Blend, AttentionQuery]] = []
        spent = n_tokens = 0
        for blend in blends:
            assert blend.work and blend.work.query
            cost = self._cost(blend.work.spans, blend.work.layer)
            n_tokens += total(blend.work.spans)
            if taken and (spent + cost > budget or n_tokens > self._context.model.max_tokens):
                break
            taken.append((blend, blend.work.query))
            spent += cost
        weights: list[HostCopy] = []
        chosen, started = RecomputeSet([query.asking for _, query in taken]), time.perf_counter()
        with fail_on_error(self._context.ranks, [blend for blend, _ in taken]):
            weights = [HostCopy(received) for received in self._received([query for _, query in taken])]
        second = (time.perf_counter() - started) / len(chosen)
        for number, ((blend, query), received) in enumerate(zip(taken, weights, strict=False)):
            with fail_on_error(self._context.ranks, [blend]):
                spans = query.asking.spans
                blend.go_on(Computed(spans, chosen, number, total(spans) * second, received))
        return spent

    def _received(self, queries: Sequence[AttentionQuery]) -> Sequence[torch.Tensor]:
        """How much the positions of each prompt are attended to, in the whole model."""
        context = self._context
        attention = context.attention
        assert attention
        # A rank without the memory would leave the others waiting in the forward.
        context.ranks.together(lambda: attention.reserve(queries))
        with torch.inference_mode():
            mine = attention.received(queries)
            return torch.split(context.ranks.sum(torch.cat(mine)), [len(received) for received in mine])

    def _cost(self, spans: Sequence[Span], layer: int) -> int:
        part, whole = self._weight(layer)
        return -(-total(spans) * part // whole)

    def _weight(self, layer: int) -> tuple[int, int]:
        """The cost of a token, as a fraction: of the probed layer it goes through one half."""
        return (2 * layer + 1, 2 * self._context.model.n_own_layers) if layer else (1, 1)


class CanFail(Protocol):
    def fail(self, error: Exception) -> None: ...


@contextmanager
def fail_on_error(ranks: Ranks, works: Sequence[CanFail]) -> Iterator[None]:
    """An error fails this work and nothing else; where ranks would part for ever, the engine ends."""
    try:
        yield
    except RankFailure as error:
        for work in works:
            work.fail(error)
    except Exception as error:  # a model that fails on chosen tokens may still compute all of them
        log.exception("the model failed on chosen tokens")
        sentence = f"the model failed on chosen tokens: {type(error).__name__}: {error}"
        if ranks.count > 1:
            where = ranks.named(ranks.number)
            ranks.end_engine(f"{sentence}{where}; the engine ends, because the other ranks may wait for this one")
        for work in works:
            work.fail(BlendHubError(sentence))


def shares(needs: Sequence[int], amount: int) -> list[int]:
    """Each request's amount of a step's budget, in the order of their arrival; none gets more than it needs.

    One half is shared equally: the work of a long prompt must not hold up the short ones behind it. All the rest goes
    to the oldest: of equal prompts the first one is ready early, and not all at the end.
    """
    if not needs:
        return []
    equal = amount // 2 // len(needs)
    amounts = [min(need, equal) for need in needs]
    left = amount - sum(amounts)
    for number, need in enumerate(needs):
        more = min(need - amounts[number], left)
        amounts[number] += more
        left -= more
    return amounts
