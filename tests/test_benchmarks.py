"""Every benchmark runs, in small, and has the rows that the documents name."""

import importlib.util
import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from benchmarks.service.questions import says

ROOT = Path(__file__).parent.parent
PROGRAMS = {
    place.stem: "".join(file.read_text() for file in ([place] if place.is_file() else place.glob("*.py")))
    for place in sorted(ROOT.glob("benchmarks/[!_]*"))
}
PROGRAMS = {name: code for name, code in PROGRAMS.items() if f'finish("{name}"' in code}
"""The code of each benchmark, by the name under which it reports."""
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("*/*/README.md"))]
FIELDS = {"id", "what", "value", "unit", "bar", "better", "ok", "spread"}


ENGINES = "harness.engines"
"""What starts engines takes minutes."""


def documented_rows(name: str) -> set[str]:
    """The ids in tables with a column ``row`` or ``id``, of the benchmark that the text before names last."""
    found = set()
    for page in PAGES:
        current, has_ids = "", False
        for line in page.read_text().splitlines():
            if not line.startswith("|"):
                current, has_ids = [current, *re.findall(r"benchmarks\.(\w+)", line)][-1], False
            elif re.match(r"\| (row|id) \|", line):
                has_ids = True
            elif has_ids and current == name:
                found |= {*re.findall(r"`(\w+)`", line.split("|")[1])}
    return found


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.long, pytest.mark.bench] * (ENGINES in code))
        for name, code in PROGRAMS.items()
    ],
)
def test_a_benchmark_runs_and_has_the_rows_that_are_documented(name, tmp_path):
    if ENGINES in PROGRAMS[name]:
        pytest.importorskip("vllm", reason="it serves with vLLM; `make setup` installs it")
    command = [sys.executable, "-m", f"benchmarks.{name}", "--quick", "--json", str(tmp_path / "report.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if re.search(r"is missing: run `make [^`]+`$", done.stderr.strip()):
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["benchmark"] == name and {"machine", "versions"} <= report.keys()
    rows = report["rows"]
    ids = [row["id"] for row in rows]
    assert len({*ids}) == len(ids) and documented_rows(name) <= {*ids}
    for row in rows:
        assert row.keys() == FIELDS and row["better"] in ("higher", "lower")
        assert (row["ok"] is None) == (row["bar"] is None or row["value"] is None)
        assert row["spread"] is None or row["spread"][0] <= row["spread"][1]
    assert [line.split()[0] for line in done.stdout.splitlines()[-len(rows) :]] == ids, "the table comes last"


def test_every_program_that_a_page_names_exists():
    assert documented_rows("load") and len(PROGRAMS) > 5
    for page in PAGES:
        for module in set(re.findall(r"python3? -m ((?:benchmarks|research|examples)\.[\w.]*\w)", page.read_text())):
            assert importlib.util.find_spec(module), f"{page.name}: there is no {module}"


def test_a_free_answer_is_right_if_the_first_of_the_choices_that_it_names_is_the_right_one():
    is_right = partial(says, "purple", ["red", "purple", "silver"], [])
    assert is_right("The house was painted PURPLE.") and is_right("It was purple, and never red")
    assert not is_right("Its colour was red, later purple.") and not is_right("The house was painted")
    assert not is_right("Purples and reds"), "words count, no parts of them"
