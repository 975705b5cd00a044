"""The check of where a layer's KV lies: as 8-bit floats divided by its scale, in bytes that only it reads, in tiles."""

import pytest
import torch
from blendhub_cpu import CpuOptions
from blendhub_cpu.device import CpuDevice
from vllm import _custom_ops as ops

from blendhub.core.errors import Unsupported
from blendhub.vllm.model.checks.model_check import _check_layout, check_model, groups_and_rotations
from blendhub.vllm.model.engine_model import EngineModel
from blendhub.vllm.model.layer_groups import pages_of
from blendhub.vllm.worker.start.worker_start import compile_kernels
from tests.stand_in import StandIn
from tests.vllm.stand_in_model import BLOCK, BLOCKS, HEADS, WIDTH, StandInModel
from tests.vllm.two_ranks import ALONE


class Fp8Model(StandInModel):
    """Keeps keys and values as 8-bit floats, each divided by a scale; in an order of its own, if a test says so."""

    unscaled = EngineModel.unscaled
    dtype = torch.bfloat16

    def __init__(self, dtype, scales, *, values_first=False, backwards=False) -> None:
        super().__init__()
        self._values_first, self._backwards = values_first, backwards
        for layer in self._layers.values():
            layer.kv_cache = layer.kv_cache.to(dtype)
            layer._k_scale, layer._v_scale = map(torch.tensor, scales)

    def write(self, index, keys, values, slots):
        layer = self._layers[self.layer_names[index]]
        most = torch.finfo(layer.kv_cache.dtype).max
        both = [(keys.float() / layer._k_scale), (values.float() / layer._v_scale)]
        kept = torch.cat(both[::-1] if self._values_first else both, -1).clamp(-most, most).to(layer.kv_cache.dtype)
        at = BLOCK - 1 - slots % BLOCK if self._backwards else slots % BLOCK
        layer.kv_cache.view(torch.uint8)[slots // BLOCK, :, at] = kept.view(torch.uint8)


def check(model: StandInModel) -> None:
    groups, _ = groups_and_rotations(model, 32)
    _check_layout(model, pages_of(model, groups))


@pytest.mark.parametrize("scales", [(1.0, 1.0), (1e-3, 1e-3), (1e-3, 0.5), (40.0, 1e-4)])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_layer_passes_and_another_order_in_its_pages_fails_whatever_its_scales(dtype, scales):
    """Numbers around 1 need more than the 448 times a scale of 1e-3 that these pages keep."""
    check(Fp8Model(dtype, scales))
    for fault in ("values_first", "backwards"):
        with pytest.raises(Unsupported, match="keys are not where BlendHub expects them"):
            check(Fp8Model(dtype, scales, **{fault: True}))


class InBytes(StandInModel):
    """Keeps keys and values of a head in a few bytes, with their scale; ``apart``: with all scales of a page behind."""

    def __init__(self, *, apart: bool = False) -> None:
        super().__init__()
        self._apart = apart
        for layer in self._layers.values():
            layer.kv_cache = torch.zeros(BLOCKS, HEADS, BLOCK, WIDTH + 4, dtype=torch.uint8)

    def write(self, index, keys, values, slots):
        pages = self.pages[index]
        scale = torch.stack([keys, values]).amax((0, 3)) / 15
        four_bits = ((keys / scale[..., None]).round() * 16 + (values / scale[..., None]).round()).to(torch.uint8)
        pages[slots // BLOCK, :, slots % BLOCK] = torch.cat([four_bits, scale[..., None].view(torch.uint8)], -1)
        if self._apart:
            parts = pages[..., :WIDTH].flatten(2), pages[..., WIDTH:].flatten(2)
            pages.copy_(torch.cat(parts, -1).view(pages.shape))


def test_kv_that_only_the_backend_can_read_is_copied_if_each_token_s_is_its_own_and_not_moved():
    model = InBytes()
    groups, candidates = groups_and_rotations(model, 32)
    assert (groups[0].layout.dtype, groups[0].layout.key_dim, groups[0].layout.value_dim) == ("int8", WIDTH + 4, 0)
    compile_kernels(lambda: CpuDevice(CpuOptions()), model, groups, candidates)
    support = check_model(model, groups, candidates, StandIn(probe_layer=0, attended_layers=()), ALONE).support
    assert support.layouts and not support.blends
    assert "keys cannot be moved; exact prefixes are reused" in support.reasons[0]
    with pytest.raises(Unsupported, match="bytes are not where BlendHub expects them"):
        check(InBytes(apart=True))


def test_pages_that_only_the_model_s_own_forward_writes_are_refused():
    model = StandInModel()
    model._layers[model.layer_names[1]] = StandIn(kv_cache=torch.zeros(BLOCKS, BLOCK, 132, dtype=torch.uint8))
    with pytest.raises(Unsupported, match=r"layers\.1\.attn is a StandIn, whose KV only the model's own"):
        groups_and_rotations(model, 32)


@pytest.mark.parametrize("n_tokens, width, in_tiles", [(BLOCK, 132, True), (BLOCK, 68, False), (2 * BLOCK, 132, False)])
def test_keys_of_an_indexer_in_another_order_are_refused(n_tokens, width, in_tiles):
    """In tiles on AMD's GPUs, with scales for 32 values, as of 4 bits, and in pages that the metadata do not count."""
    model = StandInModel()
    pages = torch.zeros(BLOCKS, n_tokens, width, dtype=torch.uint8)
    model._layers[model.layer_names[1]] = StandIn(kv_cache=pages, uses_shuffled_layout=in_tiles)
    with pytest.raises(Unsupported, match=rf"layers\.1\.attn keeps the keys of an indexer in .*, {width}\], or in til"):
        groups_and_rotations(model, 32)


class OnCpus(StandInModel):
    """A layer of vLLM's CPU backend, with its own kernel for these instructions."""

    block_size, dtype = 32, torch.bfloat16

    def __init__(self, instructions: str) -> None:
        super().__init__(n_layers=1, width=32)
        self._layers[self.layer_names[0]].kv_cache = self.pages[0].bfloat16()
        self._instructions = instructions

    def write(self, index, keys, values, slots):
        pages = self.pages[index]
        key_pages, value_pages = pages.view(BLOCKS, HEADS, 2 * self.block_size, -1).chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(
            keys, values, key_pages, value_pages, slots, self._instructions, 1.0, 1.0, kv_cache_dtype="auto"
        )


@pytest.mark.skipif(not hasattr(ops, "cpu_attn_reshape_and_cache"), reason="this vLLM was not built for CPUs")
@pytest.mark.parametrize("instructions, format", [("amx", "packed_tiles"), ("vec", "packed_transposed")])
def test_what_vllm_s_kernel_writes_on_a_cpu_shows_the_format_of_its_pages(instructions, format):
    model = OnCpus(instructions)
    token = torch.zeros(1, HEADS, 32).bfloat16()
    try:
        model.write(0, token, token, torch.tensor([0]))
    except RuntimeError as error:
        pytest.skip(f"vLLM's kernel does not write so on this processor: {error}")
    groups, _ = groups_and_rotations(model, 64)
    assert groups[0].format == format
    _check_layout(model, pages_of(model, groups))
