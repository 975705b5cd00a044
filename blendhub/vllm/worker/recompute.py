"""The work of one request on a worker: load, choose what to recompute, recompute; a bounded piece at a time."""

import math
import time
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import torch

from blendhub.contracts import Device, PagedLayer, Selector
from blendhub.layout import KVLayout
from blendhub.plan import Span
from blendhub.vllm.messages import Load, LoadResult
from blendhub.vllm.spans import joined, pieces, sampled, total
from blendhub.vllm.worker.model.engine_model import EngineModel, positions_of
from blendhub.vllm.worker.model.pages import read_as_computed

Reduce = Callable[[torch.Tensor], torch.Tensor]


class Engine:
    """What all loads of a worker share."""

    def __init__(
        self,
        model: EngineModel,
        layers: list[PagedLayer],
        layout: KVLayout,
        device: Device,
        selector: Selector,
        sum_over_ranks: Reduce,
    ) -> None:
        self.model = model
        self.layers = layers
        self.layout = layout
        self.device = device
        self.selector = selector
        self.sum_over_ranks = sum_over_ranks


class Blend:
    """One request, whose stored KV has arrived. Call ``step`` until ``outcome`` is there.

    Work is counted in tokens that go through the whole model, and never cut by the clock: all ranks of a
    tensor-parallel group must compute the same tokens together.
    """

    def __init__(self, engine: Engine, job: Load) -> None:
        self.job = job
        self.outcome: LoadResult | None = None
        self._engine = engine
        self._budget = 0
        self._seconds = 0.0
        self._recomputed: tuple[Span, ...] = ()
        self._work = self._pieces()

    def step(self, budget: int) -> int:
        """Do a piece of at most ``budget`` tokens' work; returns how much it was."""
        self._budget = budget
        started = time.perf_counter()
        done = next(self._work, None)
        self._seconds += time.perf_counter() - started
        if done is None:
            self.outcome = LoadResult(self._recomputed, total(self.job.decision.holes), self._seconds)
        return done or 0

    def _pieces(self) -> Iterator[int]:
        decision, model, selector = self.job.decision, self._engine.model, self._engine.selector
        chosen: list[Span] = []
        if decision.moved:
            scores = None
            if selector.probe_layer:
                scores = np.zeros(len(self.job.tokens), np.float32)
                if 0 < decision.ratio < 1:  # otherwise there is nothing to choose
                    yield from self._probe(scores)
            chosen = selector.select(decision.moved, decision.ratio, self._engine.device.block_tokens, scores)
        self._recomputed = tuple(chosen)
        for piece in self._cut(joined([*decision.holes, *chosen])):
            model.forward(self.job.tokens, self.job.blocks, piece)
            yield total(piece)

    def _cut(self, runs: list[Span], weight: float = 1.0) -> Iterator[list[Span]]:
        """Pieces of the budget that is left when each is asked for. ``weight`` is what a token costs."""
        model = self._engine.model
        while runs:
            piece = next(pieces(runs, max(1, min(model.max_tokens, int(self._budget / weight))), model.max_runs))
            done = piece[-1].end
            # Some attention backends compute short runs as they do generated tokens: those that come first.
            yield sorted(piece, key=len)
            runs = [Span(max(run.start, done), run.end) for run in runs if run.end > done]

    def _probe(self, scores: npt.NDArray[np.float32]) -> Iterator[int]:
        """Compute the first layers of a share of what moved, and score it by how far its stored KV is from that.

        The first layer's KV depends on nothing around it, so that all of it is right before the probe, but for holes.
        """
        engine, decision = self._engine, self.job.decision
        layer, group, share = engine.selector.probe_layer, engine.device.block_tokens, engine.selector.probe_share
        weight = (layer + 0.5) / len(engine.layers)
        samples = [sample for span in decision.moved for sample in sampled(span, group, share)]
        scored = np.zeros(len(scores), bool)
        scored[positions_of(samples)] = True
        for piece in self._cut(joined([*samples, *decision.holes]), weight):
            # The one thing of a piece that waits for the device.
            found = self._score(piece).cpu().numpy()
            at = positions_of(piece)
            scores[at[scored[at]]] = found[scored[at]]
            yield math.ceil(len(at) * weight)
        if share < 1:
            for span in decision.moved:
                _spread(scores[span.start : span.end], group, math.ceil(group * share))

    def _score(self, piece: list[Span]) -> torch.Tensor:
        """Probe a piece, and leave what was computed in the pages."""
        engine, layer = self._engine, self._engine.selector.probe_layer
        fresh = engine.model.forward_until(layer, self.job.tokens, self.job.blocks, piece)
        slots = engine.model.slots(self.job.blocks, piece)
        with torch.inference_mode():
            stored = read_as_computed(engine.model, engine.layers[layer], engine.layout, slots)
            scores = engine.sum_over_ranks(engine.selector.score(fresh, stored))
            # The probed layer's KV follows from complete layers, so it is better than what is stored.
            engine.model.write(layer, *fresh, slots)
        return scores


def _spread(scores: npt.NDArray[np.float32], group: int, probed: int) -> None:
    """Give the tokens of each group that were not probed the mean of those that were."""
    whole = len(scores) // group * group
    groups = scores[:whole].reshape(-1, group)
    groups[:, probed:] = groups[:, :probed].mean(axis=1, keepdims=True)
    rest = scores[whole:]
    if len(rest) > probed:
        rest[probed:] = rest[:probed].mean()
