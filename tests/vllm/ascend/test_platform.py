"""The files ``inside_*.py``, in processes with the Python of vLLM 0.23 and of vllm-ascend."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

INSIDE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_platform_serves_vllm_ascends_own_classes(vllm_023):
    """In one process: what they import takes most of the time."""
    files = sorted(map(str, INSIDE.glob("inside_*.py")))
    environment = os.environ | vllm_023 | {"VLLM_LOGGING_LEVEL": "ERROR"}
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:]
    assert " skipped" not in done.stdout and " passed" in done.stdout
