"""The byte that says how much a token's KV has changed: its scale, its sums over ranks, and what it waits for."""

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm", reason="the adapter's tests need vLLM; `make setup` installs it")

import torch

from blendhub import PluginHost, Span
from blendhub.contracts import PagedLayer
from blendhub.core.layout import KVLayout
from blendhub.core.spans import Match
from blendhub.vllm.decision import Decision
from blendhub.vllm.messages import LoadJob
from blendhub.vllm.model.chosen import Chosen, Part, positions_of
from blendhub.vllm.model.engine_model import EngineModel
from blendhub.vllm.model.pages import paged_layer
from blendhub.vllm.worker import comparison
from blendhub.vllm.worker.comparison import LEAST, STEPS, ComparedLayer, Comparison, as_bytes, compared_layer, squares
from blendhub.vllm.worker.recompute import Blend, BlendContext
from tests.vllm.blending import to_the_end
from tests.vllm.stand_in_model import BLOCK, BLOCKS, HEADS, WIDTH, StandInModel
from tests.vllm.two_ranks import ALONE, on_two_ranks

LAYOUT = KVLayout(layers=2, kv_heads=HEADS, key_dim=WIDTH, value_dim=WIDTH, dtype="float32", chunk_tokens=32)
HOST = PluginHost.discover()


def of_change(change: float) -> int:
    """The byte of tokens whose keys and values have changed so much."""
    fresh = torch.randn(5, HEADS, WIDTH, generator=torch.Generator().manual_seed(1))
    sums = squares((fresh, fresh), (fresh * (1 + change), fresh * (1 - change)))
    (byte,) = set(as_bytes(sums, LEAST).tolist())
    return byte


def test_the_scale_is_the_logarithm_of_the_change():
    assert of_change(0) == of_change(LEAST * 0.99) == 1
    assert of_change(LEAST * 2.001) == 1 + STEPS
    assert of_change(LEAST * 4.001) == 1 + 2 * STEPS
    assert of_change(2.2) == of_change(1e9) == 255


def test_keys_and_values_count_alike_and_a_latent_has_keys_alone():
    fresh = torch.ones(3, HEADS, WIDTH)
    of_keys = as_bytes(squares((fresh, fresh), (2 * fresh, fresh)), LEAST)
    of_values = as_bytes(squares((fresh, fresh), (fresh, 2 * fresh)), LEAST)
    of_latent = as_bytes(squares((fresh, fresh[..., :0]), (2 * fresh, fresh[..., :0])), LEAST)
    assert of_keys.tolist() == of_values.tolist()
    assert of_latent.tolist() == [of_change(1.0)] * 3
    assert of_keys[0] == of_change(0.5**0.5)


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_kv_that_is_no_number_has_the_largest_byte(broken):
    fresh, stored = torch.ones(2, HEADS, WIDTH), torch.ones(2, HEADS, WIDTH)
    stored[1, 0, 0] = broken
    assert as_bytes(squares((fresh, fresh), (stored, fresh)), LEAST).tolist() == [1, 255]


def test_kv_of_zeros_has_the_lowest_byte():
    nothing = torch.zeros(2, HEADS, WIDTH)
    assert as_bytes(squares((nothing, nothing), (nothing, nothing)), LEAST).tolist() == [1, 1]


@pytest.mark.parametrize(
    "n_layers, probe_layer, layer", [(36, 1, 24), (4, 0, 2), (2, 0, 1), (1, 0, None), (6, 4, 5), (6, 5, None)]
)
def test_a_layer_is_compared_that_depends_on_context_and_is_not_probed(n_layers, probe_layer, layer):
    assert compared_layer(n_layers, probe_layer) == layer


TOKENS = np.random.default_rng(0).integers(0, 1000, 60, dtype=np.uint32)
MOVED = [Span(4, 20), Span(20, 36), Span(40, 60)]
"""Between them is a hole."""


def chosen(spans: list[Span]) -> Chosen:
    return Chosen([Part(TOKENS, np.arange(BLOCKS), spans)])


def blended(ratio: float, ranks=ALONE, pages=lambda shape: torch.ones(shape)) -> tuple[Blend, list[Span]]:
    """A request all of whose stored KV is what ``pages`` makes, recomputed to its end by small batches."""
    model = StandInModel()
    for name in model.layer_names:
        model.layer(name).kv_cache[:] = pages((BLOCKS, HEADS, BLOCK, 2 * WIDTH))
    layers = [paged_layer(model, index) for index in range(2)]
    compared = ComparedLayer(model, 1, layers[1], LAYOUT, ranks)
    device = SimpleNamespace(block_tokens=1)
    selector = HOST.create("selector", "combined")
    context = BlendContext(model, layers, LAYOUT, device, selector, ranks, compared)
    decision = Decision(4, 60, tuple(Match(span, 1, span.start + 100, False) for span in MOVED), ratio)
    blend = Blend(context, LoadJob("r", "space", TOKENS, np.arange(BLOCKS), decision))
    to_the_end(context, [blend], budget=7)
    return blend, list(blend.result.recomputed)


def found(blend: Blend) -> np.ndarray:
    measured = np.zeros(60, np.uint8)
    for one in blend.comparisons:
        measured[one.positions] = one.found()
    return measured


@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
def test_every_recomputed_moved_token_is_compared_and_no_other(ratio, monkeypatch):
    monkeypatch.setattr(comparison, "PIECE", 3)
    blend, recomputed = blended(ratio)
    expected = np.zeros(60, bool)
    if recomputed:
        expected[positions_of(recomputed)] = True
    assert ((found(blend) > 0) == expected).all()
    assert (ratio == 0) == (not expected.any())


def test_tokens_are_compared_with_what_was_stored_of_them():
    """At the compared layer, before they were overwritten."""
    model = StandInModel()
    fresh = model.computed(1, chosen([Span(0, 60)]))
    stored = torch.ones(60, HEADS, WIDTH)
    expected = as_bytes(squares(fresh, (stored, stored)), LEAST).numpy()
    blend, _ = blended(1.0)
    at = positions_of(MOVED)
    assert (found(blend)[at] == expected[at]).all() and len(set(expected.tolist())) > 5


def test_kv_that_is_computed_as_it_was_stored_has_the_lowest_byte():
    first, _ = blended(1.0)
    pages = [first._context.model.layer(name).kv_cache.clone() for name in first._context.model.layer_names]
    again, _ = blended(1.0, pages=lambda shape: pages[1])
    assert set(found(again)[positions_of(MOVED)].tolist()) == {1}


def test_ranks_find_the_same_bytes_and_the_first_one_reports_them():
    def work(ranks):
        """The other rank's heads have not changed."""
        compared = ComparedLayer(Constant(1.0 if ranks.number else 2.0), 0, LAYER, LAYOUT, ranks)
        one = Comparison(compared, chosen([Span(0, 3)]))
        LAYER.tensors[0].fill_(1.0)
        return one._measured().tolist()

    alone = as_bytes(torch.tensor([[1.0, 2.0, 1.0, 2.0]]).T, LEAST).tolist()
    assert on_two_ranks(work) == [alone * 3, alone * 3]


LAYER = PagedLayer("layer", "packed_heads", (torch.zeros(BLOCKS, HEADS, BLOCK, 2 * WIDTH),))


class Constant(StandInModel):
    """A model whose pages hold one number everywhere."""

    def __init__(self, number: float) -> None:
        super().__init__()
        LAYER.tensors[0].fill_(number)


class Meta:
    """A model on a device that has no numbers: waiting for one is an error."""

    page_size = BLOCK
    unscaled = EngineModel.unscaled

    def slots(self, chosen):
        return torch.empty(len(chosen), dtype=torch.int64, device="meta")


def test_a_comparison_waits_for_nothing():
    pages = torch.empty((BLOCKS, HEADS, BLOCK, 2 * WIDTH), dtype=torch.float32, device="meta")
    compared = ComparedLayer(Meta(), 0, PagedLayer("layer", "packed_heads", (pages,)), LAYOUT, ALONE)
    measured = Comparison(compared, chosen([Span(0, 3), Span(7, 50)]))._measured()
    assert measured.device.type == "meta" and measured.shape == (46,) and measured.dtype is torch.uint8
