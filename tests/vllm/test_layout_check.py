"""The check of where a layer's KV lies, with 8-bit floats: they are kept divided by the layer's own scale."""

import pytest

pytest.importorskip("vllm", reason="the adapter's tests need vLLM; `make setup` installs it")

import torch

from blendhub.core.errors import Unsupported
from blendhub.vllm.model.engine_model import EngineModel
from blendhub.vllm.model.layer_groups import pages_of
from blendhub.vllm.model.model_check import _check_layout, groups_and_rotations
from tests.vllm.stand_in_model import BLOCK, StandInModel


class Fp8Model(StandInModel):
    """Keeps keys and values as 8-bit floats, each divided by a scale."""

    unscaled = EngineModel.unscaled

    def __init__(self, dtype: torch.dtype, key_scale: float, value_scale: float) -> None:
        super().__init__()
        self.config.model_config.dtype = torch.bfloat16
        for layer in self._layers.values():
            layer.kv_cache = layer.kv_cache.to(dtype)
            layer._k_scale, layer._v_scale = torch.tensor(key_scale), torch.tensor(value_scale)

    def write(self, index, keys, values, slots):
        layer = self._layers[self.layer_names[index]]
        most = torch.finfo(layer.kv_cache.dtype).max
        scaled = (
            (keys.float() / layer._k_scale).clamp(-most, most),
            (values.float() / layer._v_scale).clamp(-most, most),
        )
        kept = torch.cat(self.ordered(*scaled), -1).to(layer.kv_cache.dtype)
        layer.kv_cache.view(torch.uint8)[slots // BLOCK, :, self.place(slots % BLOCK)] = kept.view(torch.uint8)

    def ordered(self, keys, values):
        return keys, values

    def place(self, slots):
        return slots


class ValuesFirst(Fp8Model):
    def ordered(self, keys, values):
        return values, keys


class TokensBackwards(Fp8Model):
    def place(self, slots):
        return BLOCK - 1 - slots


def check(model: Fp8Model) -> None:
    groups, _ = groups_and_rotations(model, 32)
    _check_layout(model, pages_of(model, groups))


SCALES = [(1.0, 1.0), (1e-3, 1e-3), (1e-3, 0.5), (40.0, 1e-4)]


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_layer_passes_whatever_its_scales(dtype, scales):
    """Numbers around 1 need more than the 448 times a scale of 1e-3 that these pages keep."""
    check(Fp8Model(dtype, *scales))


@pytest.mark.parametrize("kind", [ValuesFirst, TokensBackwards])
@pytest.mark.parametrize("scales", SCALES)
def test_another_order_in_the_pages_fails_whatever_the_scales(kind, scales):
    with pytest.raises(Unsupported, match="keys are not where BlendHub expects them"):
        check(kind(torch.float8_e4m3fn, *scales))
