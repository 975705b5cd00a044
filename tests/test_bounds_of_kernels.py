"""Numba's kernels read and write outside no array: compiled as ever they would not notice."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba", reason="kernels need numba; `make setup` installs it")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[1]
NAIVE = "test_the_tag_of_every_window_is_that_of_the_naive_polynomial"
OUTSIDE = "import numba, numpy; numba.njit(lambda items: items[items.size])(numpy.zeros(4))"


def test_the_matcher_suite_stays_within_the_arrays():
    """The kernels are compiled for it, into a place of their own, where they stay until their sources change."""
    environment = os.environ | {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(ROOT / "build" / "kernels")}

    def run(*arguments):
        command = [sys.executable, *arguments]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)

    assert "IndexError" in run("-c", OUTSIDE).stderr, "reading outside of an array would not be noticed"
    folder = "plugins/matchers/tests"
    tests = [f"{folder}/test_conformance.py::TestRollingHash", f"{folder}/test_rolling_hash.py::{NAIVE}"]
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", *tests)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout
