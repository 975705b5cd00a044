"""Options and errors of the CUDA device that the contract does not cover."""

import ctypes
from types import SimpleNamespace
from typing import Any

import blendhub_cuda
import pytest
import torch
from blendhub_cuda import CudaOptions
from blendhub_cuda.device import CudaDevice
from blendhub_cuda.runtime import kernels_use_host_addresses

from blendhub.core.errors import Unsupported
from blendhub.testing.devices.device_harness import DeviceHarness, DeviceSetup


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
