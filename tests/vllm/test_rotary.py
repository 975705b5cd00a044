"""Tables of rotary embeddings: no more rows than the engine has positions, and no table twice."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.mrope import MRotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.yarn_scaling_rope import YaRNScalingRotaryEmbedding

from blendhub.vllm.model.rotary import digest, rotated, rotations_of
from blendhub.vllm.model.runner import Runner
from tests.stand_in import StandIn

TEN_MILLION, SERVED, WIDTH = 10_485_760, 8192, 16


class LargestTensor(TorchDispatchMode):
    items = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.items = max(self.items, made.numel())
        return made


def rotations(*parts, n=SERVED):
    module = torch.nn.Module()
    module.parts = torch.nn.ModuleList(parts)
    return rotations_of(module, WIDTH, n)


@pytest.fixture(autouse=True)
def configured():
    with set_current_vllm_config(VllmConfig()):
        yield


class Rotary(RotaryEmbedding):
    """A model of ten million positions as vLLM configures it; its own table, of which vLLM has one, is left out."""

    def __init__(self, n_positions=TEN_MILLION, base=500000.0):
        super().__init__(WIDTH, WIDTH, n_positions, base, True, torch.float32, init_cache=False)


class OfItsLength(Rotary):
    """Its angles depend on how many positions it has."""

    def _compute_inv_freq(self, base):
        return super()._compute_inv_freq(base) / self.max_position_embeddings


@pytest.mark.parametrize("kind", ["usual", "of its length", "stretched"])
def test_rows_are_those_of_the_whole_table_which_is_cut_after_it_was_computed_if_it_depends_on_its_length(kind):
    part = {
        "usual": lambda: Rotary(20_000),
        "of its length": lambda: OfItsLength(20_000),
        "stretched": lambda: YaRNScalingRotaryEmbedding(WIDTH, WIDTH, 1024, 10000.0, True, 16.0, torch.float32),
    }[kind]()
    whole = part._compute_cos_sin_cache()
    for rotation in rotations(part):
        assert torch.equal(rotation.cos_sin, whole[:SERVED])
        # Not a view, which would keep all rows.
        assert rotation.cos_sin.untyped_storage().nbytes() == SERVED * WIDTH * 4
    assert part.max_position_embeddings in (20_000, 1024)


def test_of_ten_million_positions_those_of_the_engine_are_computed_and_equal_tables_are_one():
    with LargestTensor() as largest:
        both = rotations(Rotary(), Rotary(), Rotary(base=10000.0))
    assert largest.items == SERVED * WIDTH
    assert [rotation.neox for rotation in both] == [True, False, True, False]
    assert len({rotation.cos_sin.data_ptr() for rotation in both}) == 2
    (longer, _) = rotations(Rotary(), n=2 * SERVED)
    assert digest(both[0]) == digest(longer) != digest(both[2])


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_keys_of_text_with_positions_of_three_dimensions_move_like_others(interleaved):
    """vLLM's class for M-RoPE: text has the same position in each dimension."""
    embedding = MRotaryEmbedding(WIDTH, WIDTH, SERVED, 10000.0, True, torch.float32, [2, 3, 3], interleaved)
    rotation, _ = rotations(embedding)
    runner = Runner.__new__(Runner)
    runner._runner = StandIn(model_config=StandIn(uses_mrope=True, mrope_num_dims=3))
    keys, old, new = torch.randn(5, 2 * WIDTH), torch.arange(5), torch.arange(SERVED - 5, SERVED)
    at_old, at_new = (
        embedding.forward_native(runner.dimensions(at, 8), keys.clone(), keys.clone())[1].view(5, 2, WIDTH)
        for at in (old, new)
    )
    torch.testing.assert_close(rotated(at_old, rotation, old, new), at_new, rtol=1e-4, atol=1e-4)
