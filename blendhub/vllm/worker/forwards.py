"""Forwards that serve all requests of a worker that are blending, within the step's budget."""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from blendhub.core.errors import BlendHubError
from blendhub.core.spans import Span, total
from blendhub.vllm.model.attention_probe import Asking
from blendhub.vllm.model.chosen import Chosen, Part
from blendhub.vllm.model.pages import read_as_computed
from blendhub.vllm.spans import cut
from blendhub.vllm.worker.ranks import RankFailure
from blendhub.vllm.worker.recompute import Blend, BlendContext, Computed, HostCopy

log = logging.getLogger(__name__)


class Forwards:
    """Runs forwards. Work is counted in tokens through the whole model; a probed token counts for its part of it."""

    def __init__(self, context: BlendContext) -> None:
        self._context = context

    def step(self, blends: Sequence[Blend], budget: int) -> int:
        """Take requests forward within the budget, in the order of their arrival; returns what it cost.

        Requests wait for the scores of their probes, but no step does.
        """
        spent = 0
        held: list[Blend] = []
        while True:
            self._go_on([blend for blend in blends if blend.is_waiting])
            ready = [blend for blend in blends if blend.work and blend not in held]
            if not ready or spent >= budget:
                return spent
            spent += self._compute(ready, budget - spent)
            held += [blend for blend in ready if blend.work and blend.work.in_next_step]

    def _go_on(self, waiting: Sequence[Blend]) -> None:
        """Continue the requests whose scores have arrived on all ranks."""
        if not waiting:
            return
        ready = self._context.ranks.least([blend.has_scores for blend in waiting])
        for blend, is_ready in zip(waiting, ready, strict=True):
            if is_ready:
                with self._failing([blend]):
                    blend.go_on()

    def _compute(self, blends: Sequence[Blend], budget: int) -> int:
        """Compute a share of each request's work: one forward for all, and one for all probes.

        What is asked is computed first and whole, one request at least: it is a few tokens.
        """
        asking = [blend for blend in blends if blend.work and blend.work.asking]
        if asking:
            return self._ask(asking, budget)
        spent = 0
        works = [blend.work for blend in blends if blend.work]
        costs = shares([self._cost(work.spans, work.layer) for work in works], budget)
        for layer in sorted({work.layer for work in works}):
            alike = [number for number, work in enumerate(works) if work.layer == layer]
            given = [self._affordable(costs[number], layer) for number in alike]
            batches = self._batches([works[number].spans for number in alike], given)
            taken = [(blends[number], batch) for number, batch in zip(alike, batches, strict=True) if batch]
            if taken:
                spent += sum(self._cost(batch, layer) for _, batch in taken)
                self._forward(taken, layer)
        return spent

    def _ask(self, blends: Sequence[Blend], budget: int) -> int:
        """Have the ends of prompts ask in one forward: of the first requests, as many as the budget pays for."""
        taken: list[tuple[Blend, Asking]] = []
        spent = n_tokens = 0
        for blend in blends:
            assert blend.work and blend.work.asking
            cost = self._cost(blend.work.spans, blend.work.layer)
            n_tokens += total(blend.work.spans)
            if taken and (spent + cost > budget or n_tokens > self._context.model.max_tokens):
                break
            taken.append((blend, blend.work.asking))
            spent += cost
        received: list[HostCopy] = []
        chosen, started = Chosen([asking.part for _, asking in taken]), time.perf_counter()
        with self._failing([blend for blend, _ in taken]):
            received = [HostCopy(one) for one in self._received([asking for _, asking in taken])]
        second = (time.perf_counter() - started) / len(chosen)
        for part, ((blend, asking), one) in enumerate(zip(taken, received, strict=False)):
            with self._failing([blend]):
                spans = asking.part.spans
                blend.go_on(Computed(spans, chosen, part, total(spans) * second, scores=one))
        return spent

    def _received(self, asking: Sequence[Asking]) -> Sequence[torch.Tensor]:
        """How much the positions of each prompt are attended to, in the whole model."""
        context = self._context
        assert context.attention
        with torch.inference_mode():
            mine = context.attention.received(asking)
            return torch.split(context.ranks.sum(torch.cat(mine)), [len(one) for one in mine])

    def _batches(self, works: Sequence[list[Span]], given: Sequence[int]) -> list[list[Span]]:
        """The first tokens of each request's work, as many as it was given, within the limits of a forward."""
        model = self._context.model
        given = shares([min(total(spans), n) for spans, n in zip(works, given, strict=True)], model.max_tokens)
        batches = [cut(spans, n) for spans, n in zip(works, given, strict=True)]
        n_spans = shares([len(batch) for batch in batches], model.max_spans)
        return [batch[:n] for batch, n in zip(batches, n_spans, strict=True)]

    def _forward(self, taken: Sequence[tuple[Blend, list[Span]]], layer: int) -> None:
        blends = [blend for blend, _ in taken]
        chosen = Chosen([Part(blend.tokens, blend.job.blocks, batch) for blend, batch in taken])
        hidden, scores, started = None, None, time.perf_counter()
        with self._failing(blends):
            if layer:
                scores = HostCopy(self._score(chosen, layer))
            else:
                hidden = self._context.model.forward(chosen)
        second = (time.perf_counter() - started) / len(chosen)
        for part, (blend, batch) in enumerate(taken):
            if not blend.error:
                with self._failing([blend]):
                    blend.go_on(Computed(batch, chosen, part, total(batch) * second, hidden, scores))

    def _score(self, chosen: Chosen, layer: int) -> torch.Tensor:
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

    def _cost(self, spans: Sequence[Span], layer: int) -> int:
        part, whole = self._weight(layer)
        return -(-total(spans) * part // whole)

    def _affordable(self, cost: int, layer: int) -> int:
        """How many tokens cost at most so much."""
        part, whole = self._weight(layer)
        return cost * whole // part

    def _weight(self, layer: int) -> tuple[int, int]:
        """The cost of a token, as a fraction: of the probed layer it goes through one half."""
        return (2 * layer + 1, 2 * len(self._context.layers)) if layer else (1, 1)

    @contextmanager
    def _failing(self, blends: Sequence[Blend]) -> Iterator[None]:
        """An error costs these requests their stored KV; where ranks would part for ever, the engine ends."""
        ranks = self._context.ranks
        try:
            yield
        except RankFailure as error:
            for blend in blends:
                blend.fail(error)
        except Exception as error:  # a model that fails on chosen tokens may still compute all of them
            log.exception("the model failed on chosen tokens")
            sentence = f"the model failed on chosen tokens: {type(error).__name__}: {error}"
            if ranks.count > 1:
                where = ranks.named(ranks.number)
                ranks.end_engine(f"{sentence}{where}; the engine ends, because the other ranks may wait for this one")
            for blend in blends:
                blend.fail(BlendHubError(sentence))


def shares(needs: Sequence[int], amount: int) -> list[int]:
    """Each request's amount of a step's budget, in the order of their arrival; none gets more than it needs.

    One half is shared equally: the work of a long prompt must not hold up the short ones behind it. All the rest goes
    to the oldest: of equal prompts the first one is ready early, and not all at the end.
    """
    if not needs:
        return []
    equal = amount // 2 // len(needs)
    given = [min(need, equal) for need in needs]
    left = amount - sum(given)
    for number, need in enumerate(needs):
        more = min(need - given[number], left)
        given[number] += more
        left -= more
    return given
