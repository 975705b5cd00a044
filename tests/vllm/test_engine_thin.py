"""The engine that `make gpu-pack` packs: vLLM without its compiled parts, on the CPU."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

pytest.importorskip("vllm", reason="the pack is made of the installed vLLM; `make setup` installs it")

from benchmarks.hardware_check import paths_of_the_checkout
from benchmarks.pack import __main__ as pack
from harness.engines import Engine
from harness.engines.tiny_model import make_tiny_model
from tests.vllm.conftest import PROBING, SETTINGS, check_recomputation

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]

ON_THE_MACHINE = """
    torch torchgen functorch triton nvidia numpy numpy.libs numba llvmlite PIL pillow pillow.libs sympy mpmath networkx
    jinja2 markupsafe filelock fsspec setuptools _distutils_hack pkg_resources typing_extensions typing_extensions.py
"""
"""What a machine for GPUs has beside the pack."""
FEW: dict[str, Any] = {"num_gpu_blocks_override": 24, "max_model_len": 256, "max_num_batched_tokens": 256}


@pytest.fixture
def site(tmp_path):
    """The unpacked pack."""
    packed, site = tmp_path / "packed", tmp_path / "site"
    try:
        pack.make(packed, sysconfig.get_python_version())
    except subprocess.CalledProcessError:
        pytest.skip("pip cannot download the wheels of the pack here")
    assert sum(wheel.stat().st_size for wheel in packed.iterdir()) < pack.MOST_MIB * 2**20
    for wheel in packed.iterdir():
        ZipFile(wheel).extractall(site)
    assert not list((site / "vllm").rglob("*.so"))
    return site


@pytest.fixture
def machine(tmp_path):
    """An interpreter that finds torch and what comes with it, and no other package."""
    place = tmp_path / "machine"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True)
    (there,) = place.glob("lib/python*/site-packages")
    here = Path(sysconfig.get_path("purelib"))
    for name in ON_THE_MACHINE.split():
        for package in [here / name, *here.glob(f"{name}-*.dist-info")]:
            if package.exists():
                (there / package.name).symlink_to(package)
    return str(place / "bin" / "python")


def test_it_starts_and_blends_as_a_full_prefill(tmp_path, site, machine, texts):
    paths = [*paths_of_the_checkout(tmp_path / "metadata"), site]
    with Engine(
        make_tiny_model(tmp_path / "two_layers", num_hidden_layers=2),
        SETTINGS | PROBING | {"chunk_tokens": 32},
        python=machine,
        environment={
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            # Without devices vLLM uses Triton though it finds no driver.
            "CUDA_VISIBLE_DEVICES": "",
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_USE_V2_MODEL_RUNNER": "0",
        },
        prepare=["tests.vllm.gpu_stand_ins", "tests.vllm.thin_on_cpu"],
        arrange=["tests.vllm.gpu_stand_ins:put_in_place", "TRITON_ATTN", "0", ""],
        compilation_config={"custom_ops": ["none"]},
        **FEW,
    ) as engine:
        assert "text is reused anywhere" in engine.log
        check_recomputation(engine, texts, 70)
