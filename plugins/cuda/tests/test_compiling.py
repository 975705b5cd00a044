"""The kernels compile for GPUs, which needs none: the interpreter accepts code that the compiler refuses."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "compiling.py"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Runs in another process, because this one has the interpreter's kernels, and with an empty Triton cache."""
    here = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment = {
        **here,
        "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run([sys.executable, SCRIPT], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
def test_the_kernel_compiles(compiled, target):
    for case, targets in compiled.items():
        assert set(targets[target]) == {"load", "save"}, case


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_accesses_are_wide(compiled, target):
    """Each thread that rotates handles half of a head, so its accesses may be half as wide."""
    for case, targets in compiled.items():
        assert set(targets[target]["save"]) == {"16"}, case
        assert set(targets[target]["load"]) <= {"8", "16"}, case
