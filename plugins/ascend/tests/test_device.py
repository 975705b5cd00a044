"""What the contract does not cover: why there is no NPU, and what the device refuses."""

import subprocess
import sys
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import blendhub_ascend
import pytest
import torch
from blendhub_ascend import AscendOptions, availability, operators
from blendhub_ascend import device as device_module

from blendhub.core.errors import Unsupported
from blendhub.testing.devices.device_harness import DeviceHarness, DeviceSetup
from plugins.ascend.tests import npu_stand_ins as npu

(SPEC,) = blendhub_ascend.blendhub_devices()


def probed(monkeypatch, *, missing=(), driver=True, error=None, torch_npu=None):
    def imports(name):
        if error:
            raise error
        return torch_npu or npu.torch_npu_of() if name == "torch_npu" else import_module(name)

    monkeypatch.setattr(availability, "find_spec", lambda name: None if name in missing else name)
    monkeypatch.setattr(availability, "DRIVER", SimpleNamespace(exists=lambda: driver))
    monkeypatch.setattr(availability, "import_module", imports)
    return SPEC.probe()


@npu.NEEDS_STAND_INS
def test_the_list_of_plugins_says_which_operators_are_used_and_why_not(monkeypatch):
    assert probed(monkeypatch, torch_npu=npu.torch_npu_of(npu.A5)) is None
    monkeypatch.setitem(operators.SCHEMAS, "npu::npu_gather_pa_kv_cache", "npu::npu_gather_pa_kv_cache() -> ()")
    written, read, copies = SPEC.details()
    assert written == "pages are written with npu::npu_scatter_pa_kv_cache, if they fit"
    assert read.startswith("pages are read with torch: npu::npu_gather_pa_kv_cache has another schema here")
    assert copies == "copies go in batches"


MISSING_LIBRARY = ImportError("libhccl.so: cannot open shared object file: No such file or directory")
TORCH_ITSELF = RuntimeError("Failed to load the backend extension: torch_npu. libascendcl.so: cannot open\n object")
OTHER_TORCH = RuntimeError("torch_npu 2.10.0 does not match torch 2.13.0")
SET_ENV = "source /usr/local/Ascend/ascend-toolkit/set_env.sh"
VERSIONS = "pip install torch==2.10.0 torch_npu==2.10.0.post4"


@pytest.mark.parametrize(
    "circumstances, reason, command",
    [
        ({"missing": ["torch"]}, "torch is not installed", VERSIONS),
        ({"missing": ["torch_npu"]}, "torch_npu is not installed", VERSIONS),
        ({"driver": False, "error": AssertionError("imported")}, "no driver of an Ascend NPU", "npu-smi info"),
        ({"error": MISSING_LIBRARY}, "libhccl.so: cannot open shared object file", SET_ENV),
        ({"error": TORCH_ITSELF}, "libascendcl.so: cannot open object", SET_ENV),
        ({"error": OTHER_TORCH}, "does not match torch 2.13.0", VERSIONS),
        ({"torch_npu": npu.torch_npu_of(available=False)}, "finds no NPU", "npu-smi info"),
    ],
)
def test_why_there_is_no_npu_and_what_changes_it(monkeypatch, circumstances, reason, command):
    unavailable = probed(monkeypatch, **circumstances)
    assert reason in unavailable.reason and unavailable.command == command
    assert command != SET_ENV or "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in unavailable.reason


def test_listing_the_device_imports_neither_torch_npu_nor_torch():
    code = "import blendhub_ascend, sys; blendhub_ascend.blendhub_devices(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_pages_elsewhere_a_310p_and_a_private_format_are_refused(monkeypatch):
    monkeypatch.setattr(device_module, "import_module", lambda name: npu.torch_npu_of())
    device = device_module.create(AscendOptions(block_tokens=7))
    assert device.block_tokens == 7 and device.torch_type == "npu"
    with pytest.raises(Unsupported, match="supports only pages in NPU memory"):
        DeviceHarness(device, "cpu", DeviceSetup(format="split"))
    with pytest.raises(Unsupported, match=r"310P, whose KV is in a private format.*kv-transfer-config"):
        operators.chip_of(203)
    fractal: Any = SimpleNamespace(name="layer 3", tensors=[SimpleNamespace(device=SimpleNamespace(type="npu"))])
    monkeypatch.setattr(torch, "ops", SimpleNamespace(npu=SimpleNamespace(get_npu_format=lambda tensor: 29)))
    with pytest.raises(Unsupported, match=r"private format 29 of torch_npu.*enable_kv_nz"):
        device._attach([fractal], 16, None)
