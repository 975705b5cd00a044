"""Options and errors of the Ascend device that the contract does not cover."""

import msgspec
import pytest
import torch
from blendhub_ascend import pages
from npu_stand_ins import A2, UNKNOWN, HostRuntime, device_on, device_on_npu_runtime

from blendhub.core.errors import Unsupported
from blendhub.testing.devices.device_harness import DeviceHarness, Rotary, Setup

SETUP = Setup(format="split", dtype="bfloat16", kv_heads=2, key_dim=16, value_dim=16, block_size=16)


def test_device_memory_is_bounded_by_staging_mib(monkeypatch):
    allocate, allocated = HostRuntime.allocate, []

    def record(runtime, nbytes):
        allocated.append(nbytes)
        return allocate(runtime, nbytes)

    monkeypatch.setattr(HostRuntime, "allocate", record)
    DeviceHarness(device_on_npu_runtime(staging_mib=12), "cpu", SETUP).device.close()
    assert len(allocated) == 6 and 11 * 2**20 < sum(allocated) <= 12 * 2**20


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3", "float8_e5m2"])
def test_quantised_kv_is_refused_with_the_flag_that_causes_it(dtype):
    with pytest.raises(Unsupported, match=rf"KV of {dtype}.*--kv-cache-dtype"):
        DeviceHarness(device_on(), "cpu", msgspec.structs.replace(SETUP, dtype=dtype))


def test_more_slots_than_32_bits_number_are_refused(monkeypatch):
    monkeypatch.setattr(pages, "MAX_SLOTS", 13 * 16)
    with pytest.raises(Unsupported, match="13 blocks of 16 tokens are too many"):
        DeviceHarness(device_on(), "cpu", SETUP)


class Fractal:
    """A tensor on an NPU whose memory is in fractal order."""

    class device:
        type = "npu"


def test_pages_in_a_private_format_are_refused(monkeypatch):
    class Operators:
        class npu:
            get_npu_format = staticmethod(lambda tensor: 29)

    monkeypatch.setattr(pages.torch, "ops", Operators)
    with pytest.raises(Unsupported, match=r"private format 29 of torch_npu.*enable_kv_nz"):
        pages._refuse_private_format("layer 3", Fractal())


@pytest.mark.parametrize("soc_version", [A2, UNKNOWN])
@pytest.mark.parametrize("neox", [True, False])
def test_layers_of_the_shape_of_mla_s_pages(soc_version, neox):
    """vllm-ascend keeps an MLA layer as its rotated part of 64 and its latent of 512, each with one head."""
    rotation = Rotary(width=64, neox=neox, positions=2048)
    setup = msgspec.structs.replace(SETUP, kv_heads=1, key_dim=64, value_dim=512, rotations=(rotation,) * 3)
    harness = DeviceHarness(device_on_npu_runtime(soc_version), "cpu", setup)
    harness.load(harness.chunks(3, 60, source=500), 7)
    harness.overwrite_pages()
    harness.save(harness.chunks(3, 60))
    harness.device.close()


def test_blocks_of_vllm_ascend_and_whole_chunks():
    """Blocks of 128 tokens, chunks of 256, and heads of 128 items."""
    sizes = {"key_dim": 128, "value_dim": 128, "block_size": 128, "chunk_tokens": 256, "n_blocks": 8, "n_shards": 3}
    setup = msgspec.structs.replace(SETUP, rotations=(Rotary(width=128, positions=4096), None), **sizes)
    harness = DeviceHarness(device_on_npu_runtime(), "cpu", setup)
    harness.load(harness.chunks(5, 600, source=3000), 131)
    harness.overwrite_pages()
    harness.save(harness.chunks(5, 600))
    harness.device.close()


def test_a_view_of_a_larger_allocation_is_served_with_the_operators_too():
    """vllm-ascend cuts pages out of memory at an address that is a multiple of 2 MiB."""
    harness = DeviceHarness(device_on_npu_runtime(), "cpu", SETUP)
    layers = []
    for layer in harness.layers:
        tensors = []
        for tensor in layer.tensors:
            whole = torch.zeros(tensor.numel() + 640, dtype=tensor.dtype)
            cut = whole[512 : 512 + tensor.numel()].view(tensor.shape)
            cut.copy_(tensor)
            tensors.append(cut)
        layers.append(msgspec.structs.replace(layer, tensors=tuple(tensors)))
    harness.replace_device(device_on_npu_runtime(), layers)
    assert harness.device._attached.loads._mover._fast_ops.scatter is not None
    harness.start_load(harness.chunks(0, 60)).wait()
    for layer, given in zip(harness.layers, layers, strict=True):
        for tensor, cut in zip(layer.tensors, given.tensors, strict=True):
            tensor.view(torch.int16).copy_(cut.view(torch.int16))
    harness.check()
    harness.device.close()
