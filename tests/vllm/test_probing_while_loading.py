"""Probes of requests whose last layers are still being copied, on two ranks whose copies end at different times."""

import numpy as np
import pytest
from msgspec.structs import replace

from blendhub import Span
from blendhub.contracts import Segment
from blendhub.core.spans import Match
from blendhub.vllm.decision import Decision
from blendhub.vllm.messages import LoadSource, StepPlan
from blendhub.vllm.model import layer_groups
from blendhub.vllm.model.layer_groups import attach, split
from blendhub.vllm.worker.connector_worker import ConnectorWorker
from blendhub.vllm.worker.load_task import PinnedArena
from tests.stand_in import StandIn
from tests.vllm.blending import HOST, context_of, load_job
from tests.vllm.played_worker import SideDevice
from tests.vllm.stand_in_model import StandInModel
from tests.vllm.two_ranks import forward_together, on_two_ranks

LAYERS, PROBED, N = 4, 2, 48
"""The layers of the model, those of them that the probe reads, and the tokens that were found elsewhere."""


@pytest.fixture(autouse=True)
def small_groups_are_split(monkeypatch):
    monkeypatch.setattr(layer_groups, "LEAST_BYTES", 0)


class Model(StandInModel):
    def __init__(self):
        super().__init__(forward_together, n_layers=LAYERS)
        self.forwards = []

    def forward(self, chosen, *, positions=None):
        self.forwards.append("whole")
        super().forward(chosen, positions=positions)

    def forward_until(self, layer, chosen):
        self.forwards.append("late probe" if self.pages[-1].any() else "probe")
        return super().forward_until(layer, chosen)


def served(ranks, until, n_probed=PROBED):
    """The steps of one rank: for each its forwards, whether the lease was released, and whether the load has ended;
    with its result, and the pages that it leaves. A probe is late if the last layer's KV is there.

    ``until``: for each group of layers the first step in which its copy may end.
    """
    device, model = SideDevice(), Model()
    context = context_of(model, "hkvd", ranks, device)
    context.groups = split(context.groups, n_probed)
    attach(device, context.groups, context.layers)
    worker = ConnectorWorker(context, HOST, "engine", 60.0)
    for pages in model.pages:  # they were tried out
        pages.zero_()
    n_bytes = LAYERS * context.groups[0].layout.keys_at(1)
    arena = np.random.default_rng(ranks.number).normal(size=2 * n_bytes // 4).astype(np.float32)
    device.pin(arena.view(np.uint8))
    leases = []
    answer = StandIn(done=lambda: True, result=lambda: None)
    client = StandIn(
        shard_at=lambda at: at, check_up=lambda: None, release=lambda lease, timeout: leases.append(lease) or answer
    )
    worker._open = lambda: PinnedArena(client, 0, "")
    decision = Decision(0, N, (Match(Span(0, N), 0, 100, False),), 0.4)
    pieces = tuple(Segment(Span(at, min(at + 32, N)), at // 32 * n_bytes, 0, 100 + at) for at in (0, 32))
    job = load_job(np.arange(N + 8, dtype=np.uint32), decision)
    job = replace(job, source=LoadSource(7, 0, pieces))
    steps = []
    for number in range(10):
        device.held_groups = {group for group, step in enumerate(until) if number < step}
        plan = StepPlan(budget=1000, loads=[job] if not number else [])
        model.forwards = []
        worker.begin_step(plan)
        worker.load(plan)
        _, loaded = worker.finished()
        steps.append((model.forwards, bool(leases), bool(loaded)))
        if loaded:
            break
    (result,) = worker.take_report().loads.values()
    return steps, result, [pages.numpy() for pages in model.pages]


def test_ranks_probe_when_all_have_the_layers_for_it_and_recompute_when_all_have_the_others():
    def work(ranks):
        return served(ranks, until=(1, 4) if ranks.number else (2, 3)), served(ranks, until=(4,), n_probed=LAYERS)

    for number, ((steps, result, pages), (_, expected, pages_behind)) in enumerate(on_two_ranks(work)):
        forwards = [forwards for forwards, *_ in steps]
        assert forwards[:5] == [[], [], ["probe"], [], ["whole"]]
        released = [released for _, released, _ in steps]
        assert released[:5] == [False] * 4 + [number == 0], "the first rank ends the lease when all have copied"
        assert result.recomputed == expected.recomputed and result.recomputed
        assert all(map(np.array_equal, pages, pages_behind))
