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
    collect = "pytest.main(['--collect-only', '-q', '-p', 'pytest_timeout', *sys.argv[1:]])"
    code = f"import benchmarks.device, benchmarks.npu_check, pytest; sys.exit({collect})"
    done = run_with(packages, code, "plugins/ascend/tests")
    assert done.returncode == 0, done.stdout + done.stderr
