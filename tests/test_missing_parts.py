"""A machine that lacks a package skips what needs it, and says at the end which command brings it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TESTS = (
    "tests/test_demo.py::test_a_machine_reuses_documents_that_only_another_has_seen",
    "plugins/fleet/tests/test_directory.py",
    "tests/page",
    "plugins/cuda/tests/test_suites.py::TestRaces",
)


@pytest.mark.slow
def test_each_missing_part_has_one_line(tmp_path):
    """Here redis-server, which whole files need, bindfs, Chromium and a module. What no package brings has no line."""
    report, whole_file = tmp_path / "report.xml", tmp_path / "test_a.py"
    why = "it is made of tensors: pip install no-such-module"
    whole_file.write_text(f"import pytest\npytest.importorskip('no_such_module', reason={why!r})\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    environment = {**os.environ, "PATH": "/nowhere"}
    done = subprocess.run([*command, *TESTS, whole_file], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    sums_up = [sys.executable, "-m", "tests.missing_parts", str(report)]
    said = subprocess.run(sums_up, cwd=ROOT, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    lines = said.stdout.splitlines()
    assert f"skipped 1: {why}" in lines
    assert sorted(line.rpartition(": ")[2] for line in lines) == [
        "apt-get install bindfs",
        "apt-get install chromium-headless-shell",
        "apt-get install redis-server",
        "pip install no-such-module",
    ]
