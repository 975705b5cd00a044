"""The recomputation of one request on a worker: select tokens and recompute them, one bounded batch at a time."""

import math
import time
from collections.abc import Generator, Iterator

import numpy as np
import numpy.typing as npt
import torch

from blendhub.contracts import Device, PagedLayer, Selection, Selector
from blendhub.hookspecs import AuditOutcome
from blendhub.layout import KVLayout
from blendhub.plan import Span, gaps
from blendhub.vllm.messages import LoadJob, LoadResult
from blendhub.vllm.spans import batches, common, joined, sampled, total
from blendhub.vllm.worker.audit import compare, inexact
from blendhub.vllm.worker.comparison import ComparedLayer, Comparison
from blendhub.vllm.worker.model.engine_model import EngineModel, positions_of
from blendhub.vllm.worker.model.pages import read_as_computed
from blendhub.vllm.worker.ranks import Ranks


class BlendContext:
    """What all blends of a worker share."""

    def __init__(
        self,
        model: EngineModel,
        layers: list[PagedLayer],
        layout: KVLayout,
        device: Device,
        selector: Selector,
        ranks: Ranks,
        compared: ComparedLayer | None = None,
    ) -> None:
        """``compared``: None where nothing is to be learned of tokens' sensitivity."""
        self.model = model
        self.layers = layers
        self.layout = layout
        self.device = device
        self.selector = selector
        self.ranks = ranks
        self.compared = compared


class Blend:
    """One request whose stored KV was loaded. Call ``step`` until ``result`` is set.

    Work is counted in tokens that go through the whole model, and never cut by the clock: all ranks of a
    tensor-parallel group must compute the same tokens together.
    """

    def __init__(self, context: BlendContext, job: LoadJob) -> None:
        self.job = job
        needs_nothing = not (job.decision.moved or job.decision.holes or job.decision.audit)
        self.result: LoadResult | None = LoadResult() if needs_nothing else None
        self.comparisons: list[Comparison] = []
        """Of the moved tokens that were recomputed, with what was stored of them."""
        self._context = context
        self._budget = 0
        self._seconds = dict.fromkeys(("probe", "recompute"), 0.0)
        self._phase = "probe"
        self._since = 0.0
        self._recomputed: tuple[Span, ...] = ()
        self._audit: AuditOutcome | None = None
        self._work = self._work_through()

    def step(self, budget: int) -> int:
        """Compute a batch that costs at most ``budget`` tokens; returns its cost."""
        self._budget = budget
        self._since = time.perf_counter()
        done = next(self._work, None)
        self._begin(self._phase)
        if done is None:
            self.result = LoadResult(
                self._recomputed,
                total(self.job.decision.holes),
                probe_seconds=self._seconds["probe"],
                recompute_seconds=self._seconds["recompute"],
                audit=self._audit,
            )
        return done or 0

    def _begin(self, phase: str) -> None:
        """The time until now was spent on the phase before."""
        now = time.perf_counter()
        self._seconds[self._phase] += now - self._since
        self._phase, self._since = phase, now

    def _work_through(self) -> Iterator[int]:
        """Probe, select, recompute and audit; yields the cost of each batch in tokens."""
        decision, selector = self.job.decision, self._context.selector
        chosen: list[Span] = []
        if decision.moved:
            scores = None
            if selector.probe_layer:
                scores = np.zeros(len(self.job.tokens), np.float32)
                if 0 < decision.ratio < 1:  # otherwise there is nothing to choose
                    yield from self._probe(scores)
            selection = self._selection(scores)
            # A plugin may fail on one rank only, and the others must not begin a forward without it.
            chosen = self._context.ranks.together(lambda: selector.select(selection))
        self._recomputed = tuple(chosen)
        self._begin("recompute")
        for batch in self._batches_within_budget(joined([*decision.holes, *chosen])):
            self._compute(batch, chosen)
            yield total(batch)
        if decision.audit:
            yield from self._work_through_audit()

    def _work_through_audit(self) -> Iterator[int]:
        """Predict the first token from the blended KV, and again after everything that was blended is computed anew.

        The request goes on with the exact KV that this leaves. All that it costs is counted like recomputation.
        """
        n = len(self.job.tokens)
        kept = [left for span in self.job.decision.moved for left in gaps(span, self._recomputed)]
        blended = yield from self._predict([Span(self.job.decision.end, n)], [])
        exact = yield from self._predict(inexact(self.job.decision, n), kept)
        if blended is not None and exact is not None:
            self._audit = compare(blended, exact)

    def _predict(self, spans: list[Span], kept: list[Span]) -> Generator[int, None, torch.Tensor | None]:
        """Compute tokens up to the last one; returns what the model predicts behind that, or None on some ranks.

        ``kept``: those of them whose stored KV is still in the pages.
        """
        predicted = None
        for batch in self._batches_within_budget(spans):
            hidden = self._compute(batch, kept)
            if max(span.end for span in batch) == spans[-1].end:
                last = int(positions_of(batch).argmax())
                predicted = self._context.model.logits(hidden[last : last + 1])
            yield total(batch)
        return predicted

    def _compute(self, batch: list[Span], stored: list[Span]) -> torch.Tensor:
        """Compute tokens anew, and compare with what was stored of them."""
        comparison = self._comparison(common(stored, sorted(batch)))
        hidden = self._context.model.forward(self.job.tokens, self.job.blocks, batch)
        if comparison:
            comparison.finish()
        return hidden

    def _selection(self, scores: npt.NDArray[np.float32] | None) -> Selection:
        """What the selector decides from; nothing in it differs between ranks."""
        decision, tokens = self.job.decision, self.job.tokens
        return Selection(
            moved=decision.moved,
            ratio=decision.ratio,
            block_tokens=self._context.device.block_tokens,
            scores=scores,
            holes=decision.holes,
            question=Span(decision.end, len(tokens)),
            tokens=tokens,
            sensitivity=self.job.known_sensitivity,
        )

    def _comparison(self, spans: list[Span]) -> Comparison | None:
        """Of tokens that are going to be recomputed, before they are."""
        if not spans or not self._context.compared:
            return None
        self.comparisons.append(Comparison(self._context.compared, self.job.blocks, spans))
        return self.comparisons[-1]

    def _batches_within_budget(self, spans: list[Span], weight: float = 1.0) -> Iterator[list[Span]]:
        """Batches within the budget that is left when each is taken. ``weight`` is the cost of a token."""
        model = self._context.model
        while spans:
            batch = next(batches(spans, max(1, min(model.max_tokens, int(self._budget / weight))), model.max_spans))
            done = batch[-1].end
            # Some attention backends treat the first short spans as decodes.
            yield sorted(batch, key=len)
            spans = [Span(max(span.start, done), span.end) for span in spans if span.end > done]

    def _probe(self, scores: npt.NDArray[np.float32]) -> Iterator[int]:
        """Compute the first layers of a share of the moved tokens, and score these by the change of their KV.

        The first layer's KV does not depend on the context, so all of it is right before the probe, except in holes.
        """
        context, decision = self._context, self.job.decision
        layer, group, share = context.selector.probe_layer, context.device.block_tokens, context.selector.probe_share
        weight = (layer + 0.5) / len(context.layers)
        samples = [sample for span in decision.moved for sample in sampled(span, group, share)]
        scored = np.zeros(len(scores), bool)
        scored[positions_of(samples)] = True
        for batch in self._batches_within_budget(joined([*samples, *decision.holes]), weight):
            # The only wait for the device in a batch.
            found = self._score(batch).cpu().numpy()
            at = positions_of(batch)
            scores[at[scored[at]]] = found[scored[at]]
            yield math.ceil(len(at) * weight)
        if share < 1:
            for span in decision.moved:
                _spread(scores[span.start : span.end], group, math.ceil(group * share))

    def _score(self, batch: list[Span]) -> torch.Tensor:
        """Probe a batch, and keep the computed KV in the pages."""
        context, layer = self._context, self._context.selector.probe_layer
        fresh = context.model.forward_until(layer, self.job.tokens, self.job.blocks, batch)
        slots = context.model.slots(self.job.blocks, batch)
        with torch.inference_mode():
            stored = read_as_computed(context.model, context.layers[layer], context.layout, slots)
            scores = context.ranks.sum(context.ranks.together(lambda: context.selector.score(fresh, stored)))
            # The probed layer's KV was computed from complete layers, so it is better than the stored KV.
            context.model.write(layer, *fresh, slots)
        return scores


def _spread(scores: npt.NDArray[np.float32], group: int, probed: int) -> None:
    """Score the tokens of each group that were not probed with the mean of those that were."""
    whole = len(scores) // group * group
    groups = scores[:whole].reshape(-1, group)
    groups[:, probed:] = groups[:, :probed].mean(axis=1, keepdims=True)
    rest = scores[whole:]
    if len(rest) > probed:
        rest[probed:] = rest[:probed].mean()
