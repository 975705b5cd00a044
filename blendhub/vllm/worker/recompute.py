"""The recomputation of one request on a worker: chooses the next tokens to compute, and uses the results."""

import math
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from blendhub.contracts import Device, Selection, Selector, checked_picks
from blendhub.core.spans import Span, join_spans, total
from blendhub.vllm.messages import LoadJob, LoadResult
from blendhub.vllm.model.attention_probe import AttentionProbe, AttentionQuery
from blendhub.vllm.model.engine_model import EngineModel
from blendhub.vllm.model.layer_groups import LayerGroup, StateGroup
from blendhub.vllm.model.pages import LayerPages
from blendhub.vllm.model.recompute_set import RecomputeSet, RequestTokens, positions_of
from blendhub.vllm.model.states.maps import packed, unpacked
from blendhub.vllm.model.states.recurrent_layer import MapInMaking
from blendhub.vllm.model.states.state_path import KeptState, PlacedMap, StatePath
from blendhub.vllm.ranks import Ranks
from blendhub.vllm.spans import behind, cut_at, sampled, spread
from blendhub.vllm.worker.attention_query import attention_query

PROBED_GROUP = 16
"""The least neighbours of which the first ones are probed, and speak for the others."""


@dataclass
class BlendContext:
    """What all blends of a worker share."""

    model: EngineModel
    layers: list[LayerPages]
    groups: Sequence[LayerGroup]
    device: Device
    selector: Selector
    ranks: Ranks
    attention: AttentionProbe | None = None
    """None if the selector does not ask what is attended to, or the model cannot be asked."""
    is_beside_others: bool = False
    """Whether other connectors may write blocks that vLLM has freed: in no order with the engine's work."""
    states: Sequence[StateGroup] = ()
    """The groups of recurrent layers, to which the device is attached behind ``groups``."""


class HostCopy:
    """A tensor that is copied to the CPU. Only ``wait`` waits for the device."""

    def __init__(self, numbers: torch.Tensor) -> None:
        self._host, self._arrival = numbers, None
        if numbers.device.type != "cpu":
            self._host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._host.copy_(numbers, non_blocking=True)
            self._arrival = torch.get_device_module(numbers.device).Event()
            self._arrival.record()

    def __len__(self) -> int:
        return len(self._host)

    def wait(self) -> None:
        if self._arrival:
            self._arrival.synchronize()

    @property
    def has_arrived(self) -> bool:
        return self._arrival is None or self._arrival.query()

    def numbers(self) -> npt.NDArray[Any] | None:
        """The numbers that have arrived; None while the copy is under way. NumPy knows no bfloat16."""
        return self._host.numpy() if self.has_arrived else None


class Work(NamedTuple):
    """The next tokens to compute of a request. A forward takes any number of the first of them."""

    spans: list[Span]
    """The spans to compute, in the order of their positions."""
    layer: int = 0
    """0: the whole model computes them; otherwise the layers before this one, at which the tokens are scored."""
    query: AttentionQuery | None = None
    """Tokens that are computed only to see what they attend to, all of them in one forward."""


class Computed(NamedTuple):
    """The result of one forward for a request."""

    spans: Sequence[Span]
    chosen: RecomputeSet
    """All tokens of the forward."""
    part: int
    """The number of the request's part in it."""
    seconds: float
    """The request's share of the time."""
    scores: HostCopy | None = None
    """What a probe has measured: the scores of all tokens of the forward, or how much each position is attended to."""


Steps: TypeAlias = Generator[Work | None, Computed | None, None]
"""A generator that yields work, and is sent what was computed of it. None: it waits for the scores of a probe."""


class Blend:
    """One request whose stored KV is loaded, all of it or as many layers as probes read.

    ``go_on`` takes it to its next ``work``, until ``result`` is set. All ranks of a tensor-parallel group must compute
    the same tokens together, so nothing here depends on the clock.
    """

    def __init__(self, context: BlendContext, job: LoadJob, maps: Sequence[npt.NDArray[np.uint8]] = ()) -> None:
        """``maps``: those of the decision, in the arena."""
        self.job = job
        self.result: LoadResult | None = None if job.decision.recomputes else LoadResult()
        self.error: Exception | None = None
        self.work: Work | None = None
        self.is_loaded = True
        """Whether the KV of all layers is there, on all ranks."""
        self.written: HostCopy | None = None
        """Beside other connectors, and with maps: what arrives when the last forward has written its KV, and read its
        maps."""
        self.made: dict[Span, HostCopy] = {}
        """The maps of segments."""
        self._packed = maps
        self._maps: list[PlacedMap] = []
        self._making = [MapInMaking(span) for span in job.decision.segments]
        self._at = job.decision.state_end
        """The position that the state of recurrent layers has come to."""
        self._context = context
        self._probed: list[Computed] = []
        self._seconds = dict.fromkeys(("probe", "recompute"), 0.0)
        self._phase = "probe"
        self._since = 0.0
        self._recomputed: tuple[Span, ...] = ()
        self._steps = self._work_through()

    @property
    def is_waiting(self) -> bool:
        """Whether it has not begun, or waits for scores."""
        return not (self.work or self.result or self.error)

    @property
    def is_ready(self) -> bool:
        """Whether it has work, and the layers that this needs."""
        return self.work is not None and (self.is_loaded or self.work.layer > 0 or self.work.query is not None)

    @property
    def is_writing(self) -> bool:
        """Whether the device may still write blocks that another connector would get when the load ends."""
        return self.written is not None and not self.written.has_arrived

    @property
    def has_scores(self) -> bool:
        """Whether all scores that the request waits for have arrived."""
        return all(probed.scores and probed.scores.has_arrived for probed in self._probed)

    @property
    def is_measured(self) -> bool:
        """Whether it waits only for its turn: its probe's scores have arrived."""
        return bool(self._probed) and self.is_waiting and self.has_scores

    def go_on(self, computed: Computed | None = None) -> None:
        """Take what was computed of its work; None if it was waiting."""
        self._since = time.perf_counter() - (computed.seconds if computed else 0.0)
        if computed and self._context.states:
            self._at = computed.spans[-1].end
            self._keep_made()
        try:
            self.work = self._steps.send(computed)
            self._begin(self._phase)
        except StopIteration:
            self._begin(self._phase)
            self.work = None
            self.result = LoadResult(
                recomputed=self._recomputed,
                holes=total(self.job.decision.holes),
                segments=self._sizes_of_maps(),
                probe_seconds=self._seconds["probe"],
                recompute_seconds=self._seconds["recompute"],
            )

    def fail(self, error: Exception) -> None:
        self.work, self.error = None, error

    def part(self, spans: Sequence[Span]) -> RequestTokens:
        """The first tokens of its work, for a forward."""
        job, path = self.job, None
        if self._context.states:
            is_last = spans[-1].end == self.job.decision.holes[-1].end
            until = self.job.decision.end if is_last else spans[-1].end
            # The tokens before moved text are computed, as its seam.
            keeps = KeptState(job.decision.maps[0].span.start, job.keeps) if job.keeps else None
            path = StatePath(self._at, until, self._maps, self._making, keeps)
        return RequestTokens(job.tokens, job.blocks, spans, path)

    def _begin(self, phase: str) -> None:
        """Begin a phase; the time until now was spent on the phase before."""
        now = time.perf_counter()
        self._seconds[self._phase] += now - self._since
        self._phase, self._since = phase, now

    def _work_through(self) -> Steps:
        """Probe, select and recompute."""
        decision, selector = self.job.decision, self._context.selector
        chosen: list[Span] = []
        if self._context.states:
            yield from self._compute_states()
            return
        if decision.moved:
            n, chooses = len(self.job.tokens), 0 < decision.ratio < 1
            scores = np.zeros(n, np.float32) if selector.probe_layer else None
            if scores is not None and chooses:
                yield from self._probe(scores)
            attended = np.zeros(n, np.float32) if self._context.attention else None
            if attended is not None and chooses:
                yield from self._attend(attended)
            selection = replace(self._selection(), scores=scores, attended=attended)
            # A plugin may fail on one rank only, and the others must not begin a forward without it.
            chosen = self._context.ranks.together(lambda: checked_picks(selector, selection))
        self._recomputed = tuple(chosen)
        self._begin("recompute")
        yield from self._compute(Work(join_spans([*decision.holes, *chosen])))

    def _compute_states(self) -> Steps:
        """Compute all holes, between which the state goes over the moved text by its maps."""
        model, job, decision = self._context.model, self.job, self.job.decision
        self._begin("recompute")

        def begin() -> None:
            layers, maps = model.recurrent_layers, map(torch.from_numpy, self._packed)
            spans = (map.span for map in decision.maps)
            self._maps = [PlacedMap(span, unpacked(packed, layers)) for span, packed in zip(spans, maps, strict=True)]
            of_states = {group.table: job.blocks[group.table] for group in self._context.states}
            if sources := {table: int(blocks[1]) for table, blocks in of_states.items() if len(blocks) > 1}:
                model.copy_states({table: int(of_states[table][0]) for table in sources}, sources)

        # What is stored may be damaged on one rank only.
        self._context.ranks.together(begin)
        borders = [border for span in decision.segments for border in (span.start, span.end)]
        yield from self._compute(Work(cut_at(decision.holes, borders)))

    def _keep_made(self) -> None:
        """Begin to copy the maps that are done to the host: the device needs its memory for the next ones."""
        for making in self._making:
            if making.span.end <= self._at and making.span not in self.made:
                self.made[making.span] = HostCopy(packed(making, self._context.model.recurrent_layers))
                making.done.clear()

    def _sizes_of_maps(self) -> tuple[tuple[Span, int], ...]:
        """How large each map is, on the rank where it is largest."""
        if not self.made:
            return ()
        mine = torch.tensor([len(map) for map in self.made.values()], dtype=torch.float64)
        return tuple(zip(self.made, map(int, self._context.ranks.largest(mine).tolist()), strict=True))

    def _compute(self, work: Work, use: Callable[[Computed], None] = lambda computed: None) -> Steps:
        """Have all of this computed, by as many forwards as it takes; ``use`` takes what each has computed."""
        while work.spans:
            computed = yield work
            assert computed
            use(computed)
            work = work._replace(spans=behind(work.spans, computed.spans[-1].end))

    def _selection(self) -> Selection:
        """What the selector decides from; nothing in it differs between ranks."""
        decision, tokens = self.job.decision, self.job.tokens
        return Selection(
            moved=decision.moved,
            ratio=decision.ratio,
            block_tokens=self._block_tokens,
            holes=decision.holes,
            question=Span(decision.end, len(tokens)),
            tokens=tokens,
        )

    @property
    def _block_tokens(self) -> int:
        """The neighbours that cost about as much as one. The device's attention fills its tiles from any spans."""
        return 1 if self._context.model.attention else self._context.device.block_tokens

    def _probe(self, scores: npt.NDArray[np.float32]) -> Steps:
        """Have the first layers of a share of the moved tokens computed, which scores these by the change of their KV.

        The first layer's KV does not depend on the context, so all of it is right before the probe, except in holes.
        """
        selector, decision = self._context.selector, self.job.decision
        group, share = max(PROBED_GROUP, self._block_tokens), selector.probe_share
        samples = [sample for span in decision.moved for sample in sampled(span, group, share)]
        spans = join_spans([*samples, *decision.holes])
        yield from self._compute(Work(spans, selector.probe_layer), self._probed.append)
        yield None
        scored = np.zeros(len(scores), bool)
        scored[positions_of(samples)] = True
        for probed in self._probed:
            changes = probed.scores.numbers() if probed.scores else None
            assert changes is not None
            places = probed.chosen.places(probed.part)
            at = probed.chosen.positions[places]
            scores[at[scored[at]]] = changes[places[scored[at]]]
        self._probed = []
        if share < 1:
            for span in decision.moved:
                spread(scores[span.start : span.end], group, math.ceil(group * share))

    def _attend(self, attended: npt.NDArray[np.float32]) -> Steps:
        """Have the end of the prompt computed over the stored KV, which shows what it attends to."""
        probe = self._context.attention
        assert probe
        query = attention_query(self.job, self._context.selector.attending_tokens)
        computed = yield Work(list(query.asking.spans), layer=probe.last, query=query)
        assert computed
        self._probed.append(computed)
        yield None
        weights = computed.scores.numbers() if computed.scores else None
        assert weights is not None
        attended[: len(weights)] = weights
        self._probed = []
