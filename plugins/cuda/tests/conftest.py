"""Without a GPU the kernels run in Triton's interpreter, which is decided here, where they are imported first."""

import os
from unittest import mock

import pytest
import torch
import triton  # noqa: F401  # imported without the interpreter, which only our kernels use

HAS_GPU = torch.cuda.is_available()

with mock.patch.dict(os.environ, {} if HAS_GPU else {"TRITON_INTERPRET": "1"}):
    import blendhub_cuda.kernels  # noqa: F401


NEEDS_GPU = pytest.mark.skip(reason="torch finds no GPU here; `make gpu-check` on a machine with one")
ONCE_IS_ENOUGH = pytest.mark.skip(
    reason="chunks of one token take the interpreter seconds; one skipped prefix is tried"
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in [] if HAS_GPU else items:
        if item.get_closest_marker("cuda"):
            item.add_marker(NEEDS_GPU)
        if "TestCuda::test_the_skipped_prefix" in item.nodeid and "chunk 1-" in item.name and "-27]" not in item.name:
            item.add_marker(ONCE_IS_ENOUGH)
