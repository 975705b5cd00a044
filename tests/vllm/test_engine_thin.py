"""The engine that `make gpu-pack` packs: vLLM without its compiled parts, on the CPU, and its models as on a GPU."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

pytest.importorskip("vllm", reason="the pack is made of the installed vLLM; `make setup` installs it")

from benchmarks.engine_check import SHAPE, paths_of_the_checkout
from benchmarks.gpu_engine import MIXTURE
from benchmarks.pack import __main__ as pack
from harness.engines import Engine, largest_difference
from harness.engines.tiny_model import make_config, make_tiny_model
from tests.vllm.conftest import PROBING, SETTINGS

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]

ON_THE_MACHINE = """
    torch torchgen functorch triton nvidia numpy numpy.libs numba llvmlite PIL pillow pillow.libs sympy mpmath networkx
    jinja2 markupsafe filelock fsspec setuptools _distutils_hack pkg_resources typing_extensions typing_extensions.py
"""
"""What a machine for GPUs has beside the pack."""
FEW: dict[str, Any] = {"num_gpu_blocks_override": 24, "max_model_len": 256, "max_num_batched_tokens": 256}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The unpacked pack."""
    packed, site = (tmp_path_factory.mktemp(name) for name in ("packed", "site"))
    try:
        pack.make(packed, sysconfig.get_python_version())
    except subprocess.CalledProcessError:
        pytest.skip("pip cannot download the wheels of the pack here")
    size = sum(wheel.stat().st_size for wheel in packed.iterdir())
    assert size < pack.MOST_MIB * 2**20
    for wheel in packed.iterdir():
        ZipFile(wheel).extractall(site)
    assert not list((site / "vllm").rglob("*.so"))
    return site


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    """An interpreter that finds torch and what comes with it, and no other package.

    ``GPU_CHECK_TORCH``: a folder with another torch than the installed one.
    """
    place = tmp_path_factory.mktemp("machine")
    searched = [Path(os.environ.get("GPU_CHECK_TORCH") or os.devnull), Path(sysconfig.get_path("purelib"))]
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True)
    (there,) = place.glob("lib/python*/site-packages")
    for name in ON_THE_MACHINE.split():
        folders = [folder for folder in searched if (folder / name).exists()][:1]
        for found in [one for folder in folders for one in (folder / name, *folder.glob(f"{name}-*.dist-info"))]:
            (there / found.name).symlink_to(found)
    return str(place / "bin" / "python")


def variables(tmp_path, site):
    searched = [*paths_of_the_checkout(tmp_path / "metadata"), site]
    # Without devices vLLM uses Triton though it finds no driver.
    return {"PYTHONPATH": os.pathsep.join(map(str, searched)), "CUDA_VISIBLE_DEVICES": ""}


def test_it_starts_and_blends_as_a_full_prefill(tmp_path, site, machine, texts):
    model = make_tiny_model(tmp_path / "two_layers", num_hidden_layers=2)
    on_a_cpu = {"VLLM_TARGET_DEVICE": "cpu", "VLLM_USE_V2_MODEL_RUNNER": "0"}
    with Engine(
        model,
        SETTINGS | PROBING | {"chunk_tokens": 32},
        python=machine,
        environment=variables(tmp_path, site) | on_a_cpu,
        prepare=["tests.vllm.gpu_stand_ins", "tests.vllm.thin_on_cpu"],
        arrange=["tests.vllm.gpu_stand_ins:put_in_place", "TRITON_ATTN", "0", ""],
        compilation_config={"custom_ops": ["none"]},
        **FEW,
    ) as engine:
        assert "text is reused anywhere" in engine.log
        first, second = texts.new(72), texts.new(70)
        engine.one([*first, *second])
        engine.forget()
        prompt = [*second, *texts.new(5), *first, *texts.new(4)]
        expected = engine.full_prefill(prompt)
        blended = engine.one(prompt, recompute_ratio=1.0, store=False)
        assert blended.report["moved_tokens"] == blended.report["recomputed_tokens"] == 142
        assert largest_difference(blended.kv(len(prompt) - 1), expected) < 1e-5


def test_vllm_makes_models_for_a_gpu(tmp_path, site, machine):
    """The operators that vLLM looks up for a GPU are there."""
    # The first one decides whether vLLM makes a group of ranks for experts.
    models = [make_config(tmp_path / "experts", **SHAPE, **MIXTURE), make_config(tmp_path / "dense", **SHAPE)]
    environment = os.environ | variables(tmp_path, site)
    script = Path(__file__).with_name("models_for_a_gpu.py")
    done = subprocess.run([machine, "-P", script, *models], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
