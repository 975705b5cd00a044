"""Tensors without numbers show that a probe waits for no number of its device."""

import numpy as np
import pytest
import torch

from blendhub import PluginHost, Span
from blendhub.contracts import PagedLayer
from blendhub.core.layout import KVLayout
from blendhub.core.spans import Match
from blendhub.vllm.decision import Decision
from blendhub.vllm.model.engine_model import EngineModel
from blendhub.vllm.model.pages import LayerPages
from blendhub.vllm.model.recompute_set import RecomputeSet, RequestTokens
from blendhub.vllm.worker.forwards import Forwards
from blendhub.vllm.worker.recompute import Blend, BlendContext
from tests.stand_in import Anything, StandIn
from tests.test_contracts import BAD_PICKS, MOVED, Picking
from tests.vllm.blending import load_job, to_the_end
from tests.vllm.two_ranks import ALONE

HEADS, WIDTH, BLOCK, BLOCKS = 2, 8, 16, 32
LAYOUT = KVLayout(layers=3, kv_heads=HEADS, key_dim=WIDTH, value_dim=WIDTH, dtype="bfloat16", chunk_tokens=32)
HOST = PluginHost.discover()


class Model(Anything):
    """A model on a device that has no numbers."""

    block_size = BLOCK
    max_tokens, max_spans = 4096, 64
    device = torch.device("meta")

    def forward_until(self, layer, chosen):
        shape = (len(chosen), HEADS, WIDTH)
        keys, values = torch.empty((2, *shape), dtype=torch.bfloat16, device="meta")
        return keys, values

    def slots(self, chosen, layer=0):
        return torch.empty(len(chosen), dtype=torch.int64, device="meta")

    def write(self, layer, keys, values, slots):
        assert keys.device.type == values.device.type == slots.device.type == "meta"

    unscaled = EngineModel.unscaled


def test_a_piece_of_a_probe_waits_for_nothing_until_its_scores_are_fetched():
    pages = torch.empty((BLOCKS, HEADS, BLOCK, 2 * WIDTH), dtype=torch.bfloat16, device="meta")
    layers = [LayerPages(PagedLayer(f"layer {n}", "packed_heads", (pages,)), LAYOUT, BLOCK) for n in range(3)]
    selector, device = HOST.create("selector", "hkvd", {}), StandIn(block_tokens=1)
    engine = BlendContext(Model(), layers, (), device, selector, ALONE)
    part = RequestTokens(np.zeros(96, np.uint32), [np.arange(8)], [Span(0, 1), Span(3, 40)])
    scores = Forwards(engine)._score(RecomputeSet([part]), 1)
    assert scores.device.type == "meta" and scores.shape == (38,)
    with pytest.raises(NotImplementedError, match="no data"):
        scores.cpu()
    with pytest.raises(RuntimeError, match="meta"):
        scores.max().item()


@pytest.mark.parametrize(
    "picked, complaint",
    [
        ([], None),
        ([Span(10, 30), Span(42, 50)], None),
        ([Span(12, 15), Span(16, 22)], None),
        *BAD_PICKS,
    ],
)
def test_what_a_selector_picks_is_computed_only_if_it_is_this_request_s_moved_text(picked, complaint):
    computed = []
    selector = Picking(picked)
    model = StandIn(max_tokens=4096, max_spans=64, forward=lambda chosen: computed.extend(chosen.spans))
    engine = BlendContext(model, [], (), StandIn(block_tokens=1), selector, ALONE)
    matches = tuple(Match(span, 1, span.start + 100 * number, False) for number, span in enumerate(MOVED, 1))
    decision = Decision(10, 50, matches, 0.5)
    blend = Blend(engine, load_job("r", np.zeros(50, np.uint32), (np.arange(8),), decision))
    to_the_end(engine, [blend])
    if complaint:
        assert complaint in str(blend.error) and not computed
    else:
        assert list(blend.result.recomputed) == picked


class Noting(Picking):
    """Keeps what it is asked, and picks nothing."""

    def select(self, selection):
        self.asked = selection
        return []


def test_a_selector_sees_the_whole_prompt_with_its_holes_and_its_question():
    selector, tokens = Noting([]), np.arange(70, dtype=np.uint32)
    model = StandIn(max_tokens=4096, max_spans=64, forward=lambda chosen: None)
    engine = BlendContext(model, [], (), StandIn(block_tokens=4), selector, ALONE)
    matches = (Match(Span(0, 10), 1, 0, True), *(Match(span, 2, span.start + 100, False) for span in MOVED))
    blend = Blend(engine, load_job("r", tokens, (np.arange(8),), Decision(5, 50, matches, 0.5)))
    to_the_end(engine, [blend])
    asked = selector.asked
    assert (asked.moved, asked.holes, asked.question) == (MOVED, [Span(30, 40)], Span(50, 70))
    assert (asked.ratio, asked.block_tokens, asked.scores) == (0.5, 4, None)
    assert asked.tokens is tokens
