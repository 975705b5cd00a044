"""Why the device cannot run here, each with the command that changes it; and nothing imports torch_npu before."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import blendhub_ascend
import pytest
from blendhub_ascend import AscendOptions, availability, operators
from blendhub_ascend import device as device_module

from blendhub.core.errors import Unsupported
from blendhub.testing.devices.device_harness import DeviceHarness, DeviceSetup
from plugins.ascend.tests.npu_stand_ins import A5, NEEDS_STAND_INS, torch_npu_of


def probed(monkeypatch, *, missing=(), driver=True, imports=None):
    monkeypatch.setattr(availability, "find_spec", lambda name: None if name in missing else name)
    monkeypatch.setattr(availability, "DRIVER", SimpleNamespace(exists=lambda: driver, __str__=lambda self: "driver"))
    monkeypatch.setattr(availability, "import_module", imports or (lambda name: torch_npu_of()))
    (spec,) = blendhub_ascend.blendhub_devices()
    return spec.probe()


def failing(error):
    def imports(name):
        raise error

    return imports


def test_the_device_is_usable_where_torch_npu_finds_an_npu(monkeypatch):
    assert probed(monkeypatch) is None


@NEEDS_STAND_INS
def test_the_list_of_plugins_says_which_operators_are_used_and_why_not(monkeypatch):
    def imports(name):
        return torch_npu_of(A5) if name == "torch_npu" else import_module(name)

    assert probed(monkeypatch, imports=imports) is None
    (spec,) = blendhub_ascend.blendhub_devices()
    monkeypatch.setitem(operators.SCHEMAS, "npu::npu_gather_pa_kv_cache", "npu::npu_gather_pa_kv_cache() -> ()")
    written, read, copies = spec.details()
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
        (
            {"driver": False, "imports": failing(AssertionError("imported"))},
            "no driver of an Ascend NPU",
            "npu-smi info",
        ),
        ({"imports": failing(MISSING_LIBRARY)}, "libhccl.so: cannot open shared object file", SET_ENV),
        ({"imports": failing(MISSING_LIBRARY)}, "TORCH_DEVICE_BACKEND_AUTOLOAD=0", SET_ENV),
        ({"imports": failing(TORCH_ITSELF)}, "libascendcl.so: cannot open object", SET_ENV),
        ({"imports": failing(OTHER_TORCH)}, "does not match torch 2.13.0", VERSIONS),
        ({"imports": lambda name: torch_npu_of(available=False)}, "finds no NPU", "npu-smi info"),
    ],
)
def test_why_there_is_no_npu_and_what_changes_it(monkeypatch, circumstances, reason, command):
    unavailable = probed(monkeypatch, **circumstances)
    assert reason in unavailable.reason and unavailable.command == command


def test_listing_and_importing_the_device_imports_neither_torch_npu_nor_torch():
    code = "import blendhub_ascend, sys; blendhub_ascend.blendhub_devices(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_sources_name_neither_cuda_nor_transfer_to_npu():
    """torch.cuda.Event is a placeholder beside vllm-ascend, whose ``query()`` is always true."""
    for file in Path(blendhub_ascend.__file__).parent.glob("*.py"):
        source = file.read_text()
        assert "torch.cuda" not in source and "transfer_to_npu" not in source and ".cuda(" not in source, file.name


def test_the_factory_makes_a_device_for_pages_on_an_npu_alone(monkeypatch):
    monkeypatch.setattr(device_module, "import_module", lambda name: torch_npu_of())
    device = device_module.create(AscendOptions(block_tokens=7))
    assert device.block_tokens == 7 and device.torch_type == "npu"
    with pytest.raises(Unsupported, match="supports only pages in NPU memory"):
        DeviceHarness(device, "cpu", DeviceSetup(format="split"))
