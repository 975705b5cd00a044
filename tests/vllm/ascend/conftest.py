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
    """A PYTHONPATH with both, and with BlendHub's tests."""
    return os.pathsep.join([str(sources_023), str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")])
