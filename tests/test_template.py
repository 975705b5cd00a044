"""The template is a whole distribution: copied, installed, found, and proven, as its README says."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

TEMPLATE = Path(__file__).parent.parent / "examples" / "plugin-template"
PLUGINS = {("matcher", "ngram"): {"window_tokens": 16}, ("selector", "edges"): {"k": 8}, ("device", "plain"): {}}


def install_template(folder: Path) -> Path:
    """Install a copy of the template beside what is installed here; returns what to put on the path."""
    copy, site = folder / "mine", folder / "site"
    shutil.copytree(TEMPLATE, copy)
    # What it needs is installed here already, and so is its build backend: no network, no second environment.
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target", str(site), str(copy)]
    subprocess.run([sys.executable, *install], check=True, capture_output=True, text=True)
    return site


@pytest.fixture(scope="module")
def blendhub(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., subprocess.CompletedProcess]:
    """Runs ``blendhub`` where the template is installed."""
    site = install_template(tmp_path_factory.mktemp("template"))

    def run(*arguments: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, "-m", "blendhub.cli", *arguments],
            env={**os.environ, "PYTHONPATH": str(site)},
            capture_output=True,
            text=True,
        )

    return run


@pytest.mark.slow
def test_the_installed_template_is_listed(blendhub):
    listed = json.loads(blendhub("plugins", "--json").stdout)
    found = [plugin for plugin in listed if plugin["distribution"] == "blendhub-example"]
    assert {(plugin["kind"], plugin["name"]) for plugin in found} == set(PLUGINS)
    assert all(plugin["available"] for plugin in found)


@pytest.mark.slow
@pytest.mark.parametrize("kind, name", PLUGINS)
def test_the_installed_template_keeps_the_contract(blendhub, kind, name):
    if kind == "device":
        pytest.importorskip("torch", reason="devices copy to tensors: pip install torch")
    done = blendhub("conformance", kind, name, "--options", json.dumps(PLUGINS[kind, name]))
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 failed" in done.stdout


@pytest.mark.slow
def test_the_templates_own_tests_pass(tmp_path):
    """Its test file is what an author keeps, so it must run as it stands."""
    pytest.importorskip("torch", reason="the template's device needs it: pip install torch")
    code = f"import sys, pytest; sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', {str(TEMPLATE / 'tests')!r}]))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(TEMPLATE), "HYPOTHESIS_STORAGE_DIRECTORY": str(tmp_path)},
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout
