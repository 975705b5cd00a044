"""The template is a whole plugin: copied, installed, found, and proven, as its README says."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TEMPLATE = Path(__file__).parent.parent / "examples" / "plugin-template"


@pytest.fixture(scope="module")
def blendhub(tmp_path_factory):
    """Runs ``blendhub`` where a copy of the template is installed beside what is installed here."""
    copy, site = tmp_path_factory.mktemp("copy") / "mine", tmp_path_factory.mktemp("site")
    shutil.copytree(TEMPLATE, copy)
    # What it needs is installed here already, and so is its build backend: no network, no second environment.
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target", str(site), str(copy)]
    subprocess.run([sys.executable, *install], check=True, capture_output=True, text=True)

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
    (found,) = (plugin for plugin in listed if plugin["name"] == "ngram")
    assert found["available"] and found["distribution"] == "blendhub-ngram"


@pytest.mark.slow
def test_the_installed_template_keeps_the_contract(blendhub):
    done = blendhub("conformance", "matcher", "ngram", "--options", '{"window_tokens": 16}')
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 failed" in done.stdout


@pytest.mark.slow
def test_the_templates_own_tests_pass(blendhub, tmp_path):
    """Its test file is what an author keeps, so it must run as it stands."""
    code = f"import sys, pytest; sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', {str(TEMPLATE / 'tests')!r}]))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(TEMPLATE), "HYPOTHESIS_STORAGE_DIRECTORY": str(tmp_path)},
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout
