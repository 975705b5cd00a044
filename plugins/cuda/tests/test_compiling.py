"""The kernels compile for GPUs, which needs none: the interpreter accepts code that the compiler refuses.

And they compile before an engine serves.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from blendhub_cuda import CudaOptions
from blendhub_cuda.device import CudaDevice
from blendhub_cuda.launcher import Launcher
from msgspec.structs import replace

from blendhub.testing.devices.deferred import DeferredRuntime
from blendhub.testing.devices.device_harness import DeviceHarness, DeviceSetup, Rotary

pytestmark = pytest.mark.slow


def compiled(kernel, cache):
    """In another process, because this one has the interpreter's kernels, and with an empty Triton cache."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(Path(__file__).parent / "compiling.py"), kernel]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout).items()


def test_the_kernel_that_copies_compiles_and_its_accesses_are_wide(tmp_path):
    """Each thread that rotates handles half of a head, so its accesses may be half as wide."""
    for case, targets in compiled("copy_tokens", tmp_path):
        for target, made in targets.items():
            assert set(made) == {"load", "save"}, (case, target)
            if target.startswith("sm_"):
                assert set(made["save"]["accesses"]) == {"16"} and set(made["load"]["accesses"]) <= {"8", "16"}, case


@pytest.mark.long
def test_the_kernel_of_attention_compiles_and_fits_into_the_memory_of_a_gpu(tmp_path):
    for case, targets in compiled("attend_chosen", tmp_path):
        for target, most in (("sm_80", 163), ("sm_90", 227)):
            assert set(targets[target]) == {"attend", "probe", "merge", "add"}, case
            assert all(made["shared"] <= most * 1024 for made in targets[target].values()), (case, target)
        for made in (targets["sm_90"][name] for name in ("attend", "probe")):
            # Keys are copied while the units for products multiply those before them, out of registers.
            assert made["ahead"] and made["products"] and made["spilled"] <= 352, (case, made)
        wide = set(targets["sm_90"]["attend"]["accesses"]) - {"16"}
        assert wide <= {"2"}, "only sinks are read in less than 16 bytes"


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled for the GPU here")
@pytest.mark.parametrize("dtype, offset", [("bfloat16", 0), ("float8_e4m3", 64)])
def test_serving_compiles_nothing(monkeypatch, dtype, offset):
    """Shards may lie at any multiple of an item. Widths are those of real models, which allow accesses of 16 bytes."""
    launched, launch = set(), Launcher._launch

    def note(launcher, *given, **constants):
        """By these arguments the compiler tells one kernel from another."""
        launched.add(tuple((name, str(value)) for name, value in {**launcher._constants, **constants}.items()))
        launch(launcher, *given, **constants)

    monkeypatch.setattr(Launcher, "_launch", note)
    rotations = Rotary(width=64, offset=offset), Rotary(width=128), Rotary(width=64, offset=offset, neox=False)
    device = CudaDevice(CudaOptions(), lambda place: DeferredRuntime())
    sizes = DeviceSetup(kv_heads=2, key_dim=128, value_dim=128, block_size=16, chunk_tokens=32, n_blocks=8)
    harness = DeviceHarness(device, "cpu", replace(sizes, dtype=dtype, rotations=rotations))
    at_attach = set(launched)
    assert len(at_attach) == 2
    for shift in (0, 2, 8, 16):
        segments = [
            replace(chunk, shard=number * harness.layout.shard_bytes + shift, source_start=chunk.span.start + 200)
            for number, chunk in enumerate(harness.chunks(3, 90))
        ]
        harness.load(segments, 7)
    harness.overwrite_pages()
    harness.save(segments)
    assert launched == at_attach
    device.close()
