"""What is published: the package with its conformance suites, and no test, benchmark or harness."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", str(folder)], cwd=ROOT, check=True)
    return folder


@pytest.mark.slow
def test_the_wheel_is_the_package(built):
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        contents = {name: wheel.read(name) for name in wheel.namelist()}
    folders = {name.partition("/")[0] for name in contents}
    assert {folder.partition("-")[0] for folder in folders} == {"blendhub"}, folders
    suites = {name: text for name, text in contents.items() if name.startswith("blendhub/testing/")}
    assert "blendhub/testing/matchers/base.py" in suites
    assert not [name for name, text in suites.items() if b"vllm" in text], "the harness is not published"


@pytest.mark.slow
def test_the_source_distribution_is_the_package_and_what_builds_it(built):
    with tarfile.open(next(built.glob("*.tar.gz"))) as source:
        top = {name.split("/")[1] for name in source.getnames()}
    files = {"README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml", "PKG-INFO", ".gitignore"}
    assert top == files | {"blendhub"}
