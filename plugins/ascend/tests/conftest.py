"""Without an NPU, strict operators of the recorded schemas stand in for those of torch_npu."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import strict_ops
from npu_stand_ins import HAS_NPU, NEEDS_NPU

if not HAS_NPU:
    strict_ops.define()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in [] if HAS_NPU else items:
        if item.get_closest_marker("npu"):
            item.add_marker(NEEDS_NPU)
