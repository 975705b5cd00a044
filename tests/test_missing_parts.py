"""A machine that lacks a package skips what needs it, and says at the end which command brings it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.namespaces import skip_unless_permitted

ROOT = Path(__file__).parent.parent
MOONCAKES = "libibverbs.so.1", "librdmacm.so.1"
CUDA_RACES = "plugins/cuda/tests/test_suites.py::TestRaces"
FLEET_DEMO = "tests/test_demo.py::test_a_machine_reuses_documents_that_only_another_has_seen"


def end_of_tests(tmp_path: Path, *tests: str, hiding: str | None = None, **environment: str) -> list[str]:
    """The lines at the end of these tests, which run in another process, where libraries may be hidden."""
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *tests]
    if hiding is not None:
        command = ["unshare", "--mount", "sh", "-c", f'{hiding} && exec "$@"', "sh", *command]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    sums_up = [sys.executable, "-m", "tests.missing_parts", str(report)]
    said = subprocess.run(sums_up, cwd=ROOT, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    return said.stdout.splitlines()


@pytest.mark.slow
def test_without_mooncakes_libraries_its_tests_are_skipped_with_the_command_that_brings_them(tmp_path):
    skip_unless_permitted(["unshare", "--mount"])
    pytest.importorskip("mooncake", reason="its libraries are hidden from it; `make setup` installs it")
    cache = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    files = [line.split(" => ")[1] for line in cache.splitlines() if line.split()[:1][0] in MOONCAKES]
    hiding = " && ".join(["true", *(f"mount --bind /dev/null {file}" for file in files)])
    # A machine may lack redis-server, too: that is a line by itself.
    lines = end_of_tests(tmp_path, FLEET_DEMO, "plugins/mooncake/tests/test_bytes.py", hiding=hiding)
    ((skipped, reason),) = (line.split(": ", 1) for line in lines if "Mooncake needs" in line)
    assert int(skipped.removeprefix("skipped ")) >= 3
    assert reason.startswith("Mooncake needs libibverbs.so.1, librdmacm.so.1")
    assert ": apt-get install libibverbs1 librdmacm1" in reason


@pytest.mark.slow
def test_each_missing_part_has_one_line(tmp_path):
    """Here redis-server, which whole files need, bindfs and Chromium. What no package brings has none."""
    tests = [
        FLEET_DEMO,
        "plugins/fleet/tests/test_directory.py",
        "tests/page",
        "plugins/cuda/tests/test_suites.py::TestRaces",
    ]
    lines = end_of_tests(tmp_path, *tests, PATH="/nowhere")
    assert sorted(line.rpartition(": ")[2] for line in lines) == [
        "apt-get install bindfs",
        "apt-get install chromium-headless-shell",
        "apt-get install redis-server",
    ]


def test_a_file_that_is_skipped_as_a_whole_says_why(tmp_path):
    why = "it is made of tensors: pip install no-such-module"
    (tmp_path / "test_a.py").write_text(f"import pytest\npytest.importorskip('no_such_module', reason={why!r})\n")
    (tmp_path / "test_b.py").write_text("def test_b(): pass\n")
    assert end_of_tests(tmp_path, str(tmp_path)) == [f"skipped 1: {why}"]
