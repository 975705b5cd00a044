"""The tables of what was tested: a result is noted with its day, and no row claims what no test stands for."""

import datetime
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import matrix, support

ROOT = Path(__file__).parent.parent
DAY = datetime.date(2026, 1, 2)


def run(device: str = "CPU", **outcomes: str) -> matrix.Run:
    tests = {name: matrix.Result(outcome, DAY) for name, outcome in outcomes.items()}
    return matrix.Run(vllm="0.32.0", compiled="its own", torch="2", python="3.11", device=device, tests=tests)


@pytest.mark.slow
def test_the_outcome_of_each_test_is_noted_once_also_where_what_it_needs_cannot_be_put_up(tmp_path):
    (tmp_path / "torch.py").write_text("__version__ = '2.13.0'\nclass cuda: is_available = bool")
    (tmp_path / "vllm.py").write_text("__version__ = '0.32.0'")
    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        "@pytest.fixture\ndef broken(): raise OSError\n"
        "def test_good(): pass\n"
        "def test_bad(): assert False\n"
        "def test_not_put_up(broken): pass\n"
        "@pytest.mark.skip\ndef test_skipped(): pass\n"
    )
    noted = tmp_path / "noted.json"
    (tmp_path / "note.py").write_text(
        "import sys, pytest; from pathlib import Path; from tests import matrix\n"
        "matrix.NOTED, folder = Path(sys.argv[1]), sys.argv[2]\n"
        "pytest.main(['-p', 'tests.matrix', '-p', 'no:cacheprovider', '--rootdir', folder, '-c', '/dev/null', folder])"
    )
    note = [sys.executable, str(tmp_path / "note.py"), str(noted), str(tmp_path)]
    subprocess.run(note, env=os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}"}, check=True, capture_output=True)
    (read,) = matrix.read(noted)
    assert (read.vllm, read.torch, read.device) == ("0.32.0", "2.13.0", "CPU")
    assert {name.partition("::test_")[2]: result.outcome for name, result in read.tests.items()} == {
        "good": "passed",
        "bad": "failed",
        "not_put_up": "failed",
        "skipped": "skipped",
    }
    assert {result.on for result in read.tests.values()} == {datetime.date.today()}


def test_newer_results_replace_older_ones_of_the_same_machine_and_are_read_as_they_were_written(tmp_path):
    merged = matrix.merge([run(a="passed", b="passed")], [run(b="failed"), run("NVIDIA H100", a="skipped")])
    assert [(one.device, {name: of.outcome for name, of in one.tests.items()}) for one in merged] == [
        ("CPU", {"a": "passed", "b": "failed"}),
        ("NVIDIA H100", {"a": "skipped"}),
    ]
    matrix.write(tmp_path / "matrix.json", merged)
    assert matrix.read(tmp_path / "matrix.json") == merged


def test_a_cell_says_what_failed_and_what_never_ran():
    assert support.summary([]) == "**never run**"
    assert support.summary(run(a="passed", b="passed").tests.values()) == "2 passed; 2026-01-02"
    assert support.summary(run(a="passed", b="failed").tests.values()) == "**1 passed, 1 failed; 2026-01-02**"


def test_every_claim_names_tests_that_the_kept_results_have():
    known = matrix.read(matrix.KEPT)
    assert matrix.still_there(known) == known, "run `make matrix`"
    for name, (_, pattern) in {**support.MODELS, **support.BACKENDS}.items():
        assert not pattern or support.named(pattern, known), name
