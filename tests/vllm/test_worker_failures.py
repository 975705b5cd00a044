"""Failures of a worker: they cost a load or a save, and where ranks would part for ever, the engine ends."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from blendhub import Match, PluginHost, Span
from blendhub.client.wire import Slot
from blendhub.core.layout import KVLayout
from blendhub.vllm.decision import Decision
from blendhub.vllm.messages import SaveJob, StepPlan
from blendhub.vllm.worker.connector_worker import ConnectorWorker
from blendhub.vllm.worker.recompute import Blend, BlendContext
from tests.stand_in import Anything, StandIn
from tests.vllm.blending import load_job, to_the_end
from tests.vllm.one_group import one_group, pages_in
from tests.vllm.stand_in_model import BLOCK, HEADS, WIDTH, StandInModel
from tests.vllm.two_ranks import ALONE, ENDED, forward_together, on_two_ranks

HOST = PluginHost.discover()
LAYOUT = KVLayout(layers=2, kv_heads=HEADS, key_dim=WIDTH, value_dim=WIDTH, dtype="float32", chunk_tokens=32)


class Crowded(StandInModel):
    def forward(self, *given, **named):
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")


class Selector(Anything):
    """Picks everything; may fail where it scores, or where it picks."""

    probe_share, attended_layers = 1.0, ()

    def __init__(self, fails_in=""):
        self.probe_layer = 1
        self._fails_in = fails_in

    def score(self, fresh, stored):
        if self._fails_in == "score":
            raise torch.OutOfMemoryError("no memory for scores")
        return torch.ones(len(fresh[0]))

    def select(self, selection):
        if self._fails_in == "select":
            raise KeyError("a mistake")
        return selection.moved


def job_of(n):
    decision = Decision(0, n, (Match(Span(0, n), 1, 100, False),), 0.5)
    return load_job("r", np.arange(n, dtype=np.uint32), (np.arange(-(-n // BLOCK)),), decision)


def blended(ranks, model_kind=StandInModel, fails_in=""):
    """The error of a load, after steps that compute its tokens."""
    model = model_kind(forward_together if ranks.count > 1 else lambda tensor: tensor)
    layers, groups = pages_in(model, LAYOUT, BLOCK), one_group(LAYOUT, BLOCK)
    device: Any = SimpleNamespace(block_tokens=1, overlaps_compute=True)
    worker = ConnectorWorker(BlendContext(model, layers, groups, device, Selector(fails_in), ranks), HOST, "e", 1.0)
    job = job_of(40)
    blend = Blend(worker._context, job)
    to_the_end(worker._context, [blend], budget=BLOCK)
    return str(blend.error or blend.result.recomputed)


def test_ranks_that_do_not_fail_compute_the_same():
    assert on_two_ranks(blended) == [str((Span(0, 40),))] * 2


def test_a_forward_that_fails_on_the_only_rank_fails_the_load():
    assert blended(ALONE, Crowded) == "the model failed on chosen tokens: OutOfMemoryError: tried to allocate 2 GiB"


def test_a_forward_that_fails_on_one_of_two_ranks_ends_the_engine():
    """The other rank waits for it in the middle of the forward."""
    other, (ended, sentence) = on_two_ranks(lambda ranks: blended(ranks, Crowded if ranks.number else StandInModel))
    assert ended == ENDED and other is None
    assert "OutOfMemoryError: tried to allocate 2 GiB (rank 1 of 2); the engine ends" in sentence


@pytest.mark.parametrize("place, sentence", [("score", "no memory for scores"), ("select", "KeyError: 'a mistake'")])
def test_a_selector_that_fails_on_one_of_two_ranks_fails_the_load_on_both(place, sentence):
    """Both know of it before the next forward."""
    for error in on_two_ranks(lambda ranks: blended(ranks, fails_in=place if ranks.number else "")):
        assert sentence in error and error.endswith("(rank 1 of 2)")


@pytest.mark.parametrize("error", [RuntimeError("CUDA error: out of memory"), MemoryError("no pinned memory")])
def test_an_error_of_the_accelerator_costs_a_load_and_a_save_and_no_step(error):
    def pin(arena, progress):
        raise error

    device: Any = SimpleNamespace(block_tokens=1, overlaps_compute=True, pin=pin, begin_step=lambda: None)
    model = StandInModel()
    worker = ConnectorWorker(
        BlendContext(model, [], one_group(LAYOUT, BLOCK), device, Selector(), ALONE), HOST, "e", 1.0
    )
    right: Any = "right"
    arena = SimpleNamespace(name=SimpleNamespace(nonce="new"), bytes=np.zeros(8, np.uint8), progress=None)
    worker._executor = StandIn(client=lambda: SimpleNamespace(arena=arena), has_tried=True)
    job, saved = job_of(40), SaveJob("s", right, Slot(Span(0, 40), 0), (np.arange(3),))
    plan = StepPlan(loads=[job], saves=[saved], ending={"s"})
    worker.begin_step(plan)
    worker.load(plan)
    worker.save(plan)
    assert worker.finished() == ({"s"}, {"r"})
    assert worker.take_failed() == [job]
    report = worker.take_report()
    assert str(error) in report.loads["r"].error and report.failed_saves == {type(error).__name__: 1}
