"""``inside_vllm_023.py``, in a process with the Python of vLLM 0.23 and of vllm-ascend."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

INSIDE = Path(__file__).with_name("inside_vllm_023.py")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_platform_does_what_vllm_ascends_classes_expect(vllm_023):
    environment = os.environ | {"PYTHONPATH": vllm_023, "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", str(INSIDE)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:]
    assert " skipped" not in done.stdout and " passed" in done.stdout
