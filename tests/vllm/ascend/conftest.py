"""Processes with the Python of vLLM 0.23 and of vllm-ascend 0.23."""

import os
from pathlib import Path

import pytest

from tests.vllm.ascend import sources


@pytest.fixture(scope="session")
def sources_023():
    """The folder with both packages."""
    try:
        return sources.fetch()
    except RuntimeError as error:
        pytest.skip(str(error))


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
