"""The kernels compile for GPUs, which needs none: the interpreter accepts code that the compiler refuses.

And they compile before an engine serves.
"""

import json
import os
import subprocess
import sys
from contextlib import closing
from itertools import product
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


def device():
    return CudaDevice(CudaOptions(), lambda place: DeferredRuntime())


@pytest.fixture
def compiled(tmp_path):
    """Runs in another process, because this one has the interpreter's kernels, and with an empty Triton cache."""

    def compiled(kernel):
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, str(Path(__file__).parent / "compiling.py"), kernel]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return compiled


def test_the_kernel_that_copies_compiles_and_its_accesses_are_wide(compiled):
    """Each thread that rotates handles half of a head, so its accesses may be half as wide."""
    for case, targets in compiled("copy_tokens").items():
        for target, made in targets.items():
            assert set(made) == {"load", "save"}, (case, target)
            if target.startswith("sm_"):
                assert set(made["save"]["accesses"]) == {"16"} and set(made["load"]["accesses"]) <= {"8", "16"}, case


@pytest.mark.long
def test_the_kernel_of_attention_compiles_and_fits_into_the_memory_of_a_gpu(compiled):
    for case, targets in compiled("attend_chosen").items():
        shared = {target: made["attend"]["shared"] for target, made in targets.items()}
        assert shared["sm_80"] <= 163 * 1024 and shared["sm_90"] <= 227 * 1024, case


WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled for the GPU here")


@pytest.fixture
def launched(monkeypatch):
    """The arguments of all launches by which the compiler tells one kernel from another."""
    kinds, launch = set(), Launcher._launch

    def note(launcher, *given, **constants):
        kinds.add(tuple((name, str(value)) for name, value in {**launcher._constants, **constants}.items()))
        launch(launcher, *given, **constants)

    monkeypatch.setattr(Launcher, "_launch", note)
    return kinds


@WITHOUT_GPU
def test_serving_compiles_nothing(launched):
    """Shards may lie at any multiple of an item."""
    widths = DeviceSetup(dtype="float16", rotations=(Rotary(),) * 3, kv_heads=2, key_dim=8, value_dim=8)
    harness = DeviceHarness(device(), "cpu", replace(widths, chunk_tokens=40, n_blocks=40, n_shards=8))
    at_attach = set(launched)
    assert len(at_attach) == 2
    for shift in (0, 2, 4, 8, 16, 32):
        for start, end in ((0, 80), (3, 50)):
            segments = [replace(one, shard=one.shard + shift) for one in harness.chunks(start, end)]
            harness.load(segments, 5)
            harness.save(segments)
    assert launched == at_attach
    harness.device.close()


@WITHOUT_GPU
def test_the_adapter_s_start_compiles_what_any_rotation_found_by_its_checks_needs(launched):
    model_check = pytest.importorskip(
        "blendhub.vllm.model.checks.model_check", reason="the adapter needs vLLM; `make setup`"
    )
    from blendhub.vllm.model.layer_groups import attach, pages_of
    from blendhub.vllm.worker.worker_start import compile_kernels
    from tests.vllm.stand_in_model import StandInModel, rotary

    model = StandInModel()
    model.module.others = torch.nn.ModuleList([rotary(width=8)])
    groups, rotations = model_check.groups_and_rotations(model, 32)
    compile_kernels(device, model, groups, rotations)
    assert len(rotations) == 4
    at_start = set(launched)
    for chosen in product([None, *rotations], repeat=2):
        with closing(device()) as attached:
            attach(attached, groups, pages_of(model, groups, chosen))
    assert launched == at_start
