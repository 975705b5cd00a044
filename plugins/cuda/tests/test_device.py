"""What the contract does not cover: why there is no GPU, and shapes of attention for chosen tokens."""

import ctypes
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import blendhub_cuda
import pytest
import torch
from blendhub_cuda import CudaOptions, attention
from blendhub_cuda.device import CudaDevice
from blendhub_cuda.runtime import CudaRuntime, kernels_use_host_addresses
from msgspec.structs import replace

from blendhub.contracts import AttentionRules
from blendhub.core.errors import Unsupported
from blendhub.testing.devices.attending import LATENT, LAYOUT, RULES, AttentionPages, check_attention, spread_out
from blendhub.testing.devices.deferred import DeferredRuntime
from blendhub.testing.devices.device_harness import DeviceHarness, DeviceSetup

HAS_GPU = torch.cuda.is_available()


@pytest.mark.parametrize("hip, name, attribute", [(None, "cu", 91), ("6.4", "hip", 4)])
def test_kernels_use_host_addresses_only_where_the_driver_says_that_they_may(monkeypatch, hip, name, attribute):
    """``libcuda`` and ``libamdhip64`` have the attribute under other numbers."""
    monkeypatch.setattr(torch.version, "hip", hip)
    for value, status, expected in ((1, 0, True), (0, 0, False), (1, 101, False)):

        def answer_with(answer, asked, device, value=value, status=status):
            assert (asked, device) == (attribute, 2)
            answer._obj.value = value
            return status

        driver: Any = SimpleNamespace(**{f"{name}DeviceGetAttribute": answer_with})
        load: Any = lambda _, driver=driver: driver  # noqa: E731
        assert kernels_use_host_addresses(torch.device("cuda", 2), load) is expected
    for no_driver in (lambda name: object(), lambda name: ctypes.CDLL("lib-not-there.so")):
        assert not kernels_use_host_addresses(torch.device("cuda", 2), no_driver)


def test_pages_that_are_not_on_a_gpu_are_refused():
    with pytest.raises(Unsupported, match="supports only pages in GPU memory"):
        DeviceHarness(CudaDevice(CudaOptions()), "cpu", DeviceSetup())


@pytest.mark.parametrize(
    "cuda, hip, has_gpu, reason, command",
    [
        (None, None, False, "for CPUs only", "pip install --force-reinstall 'torch>=2.6'"),
        ("12.8", None, False, "finds no GPU", "make one visible; nvidia-smi shows those there are"),
        (None, "6.4", False, "finds no GPU", "make one visible; rocm-smi shows those there are"),
        ("12.8", None, True, "Triton is not installed", "pip install 'triton>=3.2'"),
    ],
)
def test_the_probe_explains_why_the_device_is_unavailable(monkeypatch, cuda, hip, has_gpu, reason, command):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(blendhub_cuda, "find_spec", lambda name: None if name == "triton" else name)
    (spec,) = blendhub_cuda.blendhub_devices()
    unavailable = spec.probe()
    assert reason in unavailable.reason and unavailable.command == command


def check(chosen, rules, pages, dtype=torch.float32, n_readable=0):
    runtime, place = (CudaRuntime, "cuda") if HAS_GPU else (lambda place: DeferredRuntime(), "cpu")
    with closing(CudaDevice(CudaOptions(), runtime)) as device:
        check_attention(device, place, chosen, rules, pages, dtype, n_readable)


@pytest.mark.slow
@pytest.mark.parametrize("group, width, value_width", [(1, 64, 32), (3, 112, 96), (4, 128, 128), (16, 96, 64)])
def test_heads_share_keys_and_values_may_be_narrower(group, width, value_width):
    pages = AttentionPages(replace(LAYOUT, key_dim=width, value_dim=value_width), block_size=128)
    check([spread_out(20, 130)], AttentionRules(2 * group, 0.2), pages)


@pytest.mark.slow
def test_readable_keys_are_cut_in_parts(monkeypatch):
    monkeypatch.setattr(attention, "PART_KEYS", 64)
    sinks = torch.tensor([0.5, -1.0, 2.0, 9.0])
    for rules in (RULES, RULES._replace(window=37, sinks=sinks)):
        check([spread_out(9, 300), [3, 290]], rules, AttentionPages(), n_readable=200)


@pytest.mark.slow
# Triton's interpreter multiplies the bits of bfloat16 as integers.
@pytest.mark.parametrize("dtype", ["float16", *(["bfloat16"] if HAS_GPU else [])])
def test_half_precision(dtype):
    check([spread_out(40, 150)], RULES, AttentionPages(replace(LAYOUT, dtype=dtype)), getattr(torch, dtype))


@pytest.mark.slow
def test_a_latent_may_have_more_heads_than_a_tile_has_rows_and_is_refused_where_it_has_no_kernel():
    check([spread_out(3, 70)], AttentionRules(130, 0.04, latent=512), AttentionPages(LATENT, "latent"))
    with pytest.raises(Unsupported, match="no kernel for values of 448 items of 576"):
        check([[0]], AttentionRules(16, 0.04, latent=448), AttentionPages(LATENT, "latent"))
