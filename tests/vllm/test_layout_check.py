"""The check of where a layer's KV lies: as 8-bit floats divided by its scale, or in bytes that only it reads."""

import pytest
import torch
from blendhub_cpu import CpuOptions
from blendhub_cpu.device import CpuDevice

from blendhub.core.errors import Unsupported
from blendhub.vllm.model.checks.model_check import _check_layout, check_model, groups_and_rotations
from blendhub.vllm.model.engine_model import EngineModel
from blendhub.vllm.model.layer_groups import attach, pages_of
from tests.stand_in import StandIn
from tests.vllm.stand_in_model import BLOCK, BLOCKS, HEADS, WIDTH, StandInModel
from tests.vllm.two_ranks import ALONE


class Fp8Model(StandInModel):
    """Keeps keys and values as 8-bit floats, each divided by a scale."""

    unscaled = EngineModel.unscaled

    def __init__(self, dtype: torch.dtype, key_scale: float, value_scale: float) -> None:
        super().__init__()
        self.dtype = torch.bfloat16
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


class InBytes(StandInModel):
    """Keeps keys and values of a head in a few bytes, with their scale."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self._layers.values():
            layer.kv_cache = torch.zeros(BLOCKS, HEADS, BLOCK, WIDTH + 4, dtype=torch.uint8)

    def write(self, index, keys, values, slots):
        pages = self._layers[self.layer_names[index]].kv_cache
        scale = torch.stack([keys, values]).amax((0, 3)) / 15
        four_bits = ((keys / scale[..., None]).round() * 16 + (values / scale[..., None]).round()).to(torch.uint8)
        kept = torch.cat([four_bits, scale[..., None].view(torch.uint8)], -1)
        pages[slots // BLOCK, :, self.place(slots % BLOCK)] = kept

    def place(self, slots):
        return slots


class ScalesApart(InBytes):
    """The scales of a page's tokens stand behind all of their numbers."""

    def write(self, index, keys, values, slots):
        super().write(index, keys, values, slots)
        pages = self._layers[self.layer_names[index]].kv_cache
        numbers, scales = pages[..., :WIDTH].flatten(2), pages[..., WIDTH:].flatten(2)
        pages.copy_(torch.cat([numbers, scales], -1).view(pages.shape))


def test_kv_that_only_the_backend_can_read_is_copied_and_not_moved():
    model = InBytes()
    groups, candidates = groups_and_rotations(model, 32)
    assert (groups[0].layout.dtype, groups[0].layout.key_dim, groups[0].layout.value_dim) == ("int8", WIDTH + 4, 0)
    device = CpuDevice(CpuOptions())
    attach(device, groups, pages_of(model, groups))
    device.close()
    support = check_model(model, groups, candidates, StandIn(probe_layer=0, attended_layers=()), ALONE).support
    assert support.layouts and not support.blends
    assert "keys cannot be moved; exact prefixes are reused" in support.reasons[0]


def test_a_token_whose_bytes_depend_on_those_beside_it_is_not_copied():
    with pytest.raises(Unsupported, match="bytes are not where BlendHub expects them"):
        check(ScalesApart())


def test_pages_that_only_the_model_s_own_forward_writes_are_refused():
    model = StandInModel()
    indexer = StandIn(kv_cache=torch.zeros(BLOCKS, BLOCK, 132, dtype=torch.uint8))
    model._layers[model.layer_names[1]] = indexer
    with pytest.raises(Unsupported, match=r"layers\.1\.attn is a StandIn, whose KV only the model's own"):
        groups_and_rotations(model, 32)
