"""What is published: packages of one version, with the conformance suites, and no test, benchmark or harness."""

import subprocess
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import blendhub

ROOT = Path(__file__).parent.parent
PROJECTS = [tomllib.loads(file.read_text())["project"] for file in ROOT.glob("plugins/*/pyproject.toml")]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist") / "dist"
    subprocess.run(["make", "--no-print-directory", "dist", f"DIST={folder}"], cwd=ROOT, check=True)
    return folder


def test_all_distributions_have_one_version_and_accept_each_other():
    assert {project["version"] for project in PROJECTS} == {blendhub.__version__}
    ours = {"blendhub", *(project["name"] for project in PROJECTS)}
    for required in (Requirement(line) for project in PROJECTS for line in project["dependencies"]):
        assert required.name not in ours or required.specifier.contains(blendhub.__version__), required
    assert f"\n## {blendhub.__version__}" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.slow
def test_every_package_has_a_wheel_and_sources_and_ours_have_the_package_alone(built):
    names = {name.replace("-", "_") for name in ("blendhub", *(project["name"] for project in PROJECTS))}
    ends = (f"-{blendhub.__version__}-py3-none-any.whl", f"-{blendhub.__version__}.tar.gz")
    assert {file.name for file in built.iterdir()} - {".gitignore"} == {name + end for name in names for end in ends}
    for name in names:
        with zipfile.ZipFile(built / (name + ends[0])) as wheel:
            assert f"{name}/py.typed" in wheel.namelist(), "type checkers read no annotations of a package without it"
    with zipfile.ZipFile(built / f"blendhub{ends[0]}") as wheel:
        contents = {name: wheel.read(name) for name in wheel.namelist()}
    assert {name.partition("/")[0].partition("-")[0] for name in contents} == {"blendhub"}
    suites = {name: text for name, text in contents.items() if name.startswith("blendhub/testing/")}
    assert "blendhub/testing/matchers/base.py" in suites
    assert not [name for name, text in suites.items() if b"vllm" in text], "the harness is not published"
    with tarfile.open(built / f"blendhub{ends[1]}") as source:
        top = {name.split("/")[1] for name in source.getnames()}
    files = {"README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml", "PKG-INFO", ".gitignore"}
    assert top == files | {"blendhub"}
