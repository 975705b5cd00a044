"""Without an NPU, strict operators of the recorded schemas stand in for those of torch_npu."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import strict_ops

HAS_NPU = False
if find_spec("torch_npu"):
    import torch_npu

    HAS_NPU = torch_npu.npu.is_available()
if not HAS_NPU:
    strict_ops.define()

NEEDS_NPU = pytest.mark.skip(reason="torch finds no NPU here; `make npu-check` on a machine with one")
NEEDS_NONE = pytest.mark.skip(reason="the operators are torch_npu's own here, and only the tests for NPUs call those")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and HAS_NPU != bool(item.get_closest_marker("npu")):
            item.add_marker(NEEDS_NONE if HAS_NPU else NEEDS_NPU)
