"""What is published: packages of one version, with the conformance suites, and no test, benchmark or harness."""

import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import blendhub
from tests.readme_commands import Newcomer, commands, serve_and_ask

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
def test_every_package_has_a_wheel_and_a_source_distribution(built):
    names = {name.replace("-", "_") for name in ("blendhub", *(project["name"] for project in PROJECTS))}
    version = blendhub.__version__
    ends = (f"-{version}-py3-none-any.whl", f"-{version}.tar.gz")
    assert {file.name for file in built.iterdir()} - {".gitignore"} == {name + end for name in names for end in ends}


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.alone
@pytest.mark.timeout(600)
def test_the_wheels_run_the_first_example_of_the_readme(built, tmp_path):
    """The environment has the wheels, which the source distributions give as well, and this one's other packages."""
    newcomer = Newcomer(tmp_path)
    environment = f"{newcomer.environment}/bin/python"
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    sources = sorted(built.glob("*.tar.gz"))
    offline = ["--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "wheel", *offline, "--wheel-dir", tmp_path / "wheels", *sources], check=True)
    for wheel in (tmp_path / "wheels").iterdir():
        with zipfile.ZipFile(wheel) as ours, zipfile.ZipFile(built / wheel.name) as published:
            assert sorted(ours.namelist()) == sorted(published.namelist())
    wheels = sorted(built.glob("*.whl"))
    subprocess.run([*pip, "--python", environment, "install", "--no-deps", "--no-index", *wheels], check=True)
    # Python does not follow the .pth files of that folder, which lead to this checkout.
    site = sysconfig.get_path("purelib", vars={"base": str(newcomer.environment)})
    Path(site, "others.pth").write_text(sysconfig.get_path("purelib"))
    where = newcomer.run('python -c "import blendhub, blendhub_cpu as c; print(blendhub.__file__, c.__file__)"').split()
    assert all(file.startswith(site) for file in where), where
    serve_and_ask(newcomer, *commands()[1:])


@pytest.mark.slow
def test_the_wheel_is_the_package(built):
    with zipfile.ZipFile(next(built.glob("blendhub-*.whl"))) as wheel:
        contents = {name: wheel.read(name) for name in wheel.namelist()}
    folders = {name.partition("/")[0] for name in contents}
    assert {folder.partition("-")[0] for folder in folders} == {"blendhub"}, folders
    suites = {name: text for name, text in contents.items() if name.startswith("blendhub/testing/")}
    assert "blendhub/testing/matchers/base.py" in suites
    assert not [name for name, text in suites.items() if b"vllm" in text], "the harness is not published"


@pytest.mark.slow
def test_the_source_distribution_is_the_package_and_what_builds_it(built):
    with tarfile.open(next(built.glob("blendhub-*.tar.gz"))) as source:
        top = {name.split("/")[1] for name in source.getnames()}
    files = {"README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml", "PKG-INFO", ".gitignore"}
    assert top == files | {"blendhub"}
