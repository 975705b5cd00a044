"""Each folder of the template is a whole distribution: copied alone, installed, found and proven."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from blendhub import PluginHost
from blendhub.framework.observers import Observers
from blendhub.outcome.report import RequestReport

TEMPLATE = Path(__file__).parent.parent / "examples" / "plugin-template"
PLUGINS = {
    "matcher": ("ngram", {"window_tokens": 16}),
    "selector": ("edges", {"k": 8}),
    "device": ("plain", {}),
    "transport": ("streams", {"max_pending": 600}),
    "store": ("sqlite", {}),
}
WHAT_IS_REFUSED = {
    "matcher": "refuses",
    "selector": "are_refused",
    "device": "change_nothing",
    "transport": "refused or too_many",
    "store": "closed_store_says_so",
}
NAMES = {kind: name for kind, (name, _) in PLUGINS.items()} | {"observer": "json_lines"}


def install_template(folder: Path, *kinds: str) -> Path:
    """Install a copy of these folders beside what is installed here; returns what to put on the path."""
    site = folder / "site"
    copies = [shutil.copytree(TEMPLATE / kind, folder / f"my-{kind}") for kind in kinds or PLUGINS]
    # What it needs is installed here already, and so is its build backend: no network, no second environment.
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target", str(site)]
    subprocess.run([sys.executable, *install, *map(str, copies)], check=True, capture_output=True, text=True)
    return site


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each folder, installed alone."""
    return {kind: install_template(tmp_path_factory.mktemp(kind), kind) for kind in NAMES}


@pytest.fixture(scope="module")
def blendhub(sites: dict[str, Path]) -> Callable[..., subprocess.CompletedProcess]:
    """Runs ``blendhub`` where one folder of the template is installed."""

    def run(kind: str, *arguments: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, "-m", "blendhub.cli", *arguments],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(sites[kind]), os.environ.get("PYTHONPATH", "")])},
            capture_output=True,
            text=True,
        )

    return run


@pytest.mark.slow
@pytest.mark.parametrize("kind", NAMES)
def test_an_installed_folder_is_listed(blendhub, kind):
    listed = json.loads(blendhub(kind, "plugins", "--json").stdout)
    (found,) = [plugin for plugin in listed if plugin["distribution"].startswith("blendhub-example")]
    assert (found["kind"], found["name"], found["distribution"]) == (kind, NAMES[kind], f"blendhub-example-{kind}")
    assert found["available"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", PLUGINS)
def test_an_installed_folder_is_judged_by_its_name(blendhub, kind):
    """The whole suite runs in the folder's own tests; here, what shows that the command finds the plugin."""
    if kind == "device":
        pytest.importorskip("torch", reason="devices copy to tensors: pip install torch")
    name, options = PLUGINS[kind]
    done = blendhub(kind, "conformance", kind, name, "--options", json.dumps(options), "-k", WHAT_IS_REFUSED[kind])
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 failed" in done.stdout and " 0 passed" not in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("kind", PLUGINS)
def test_the_folder_s_own_tests_pass(tmp_path, kind):
    """Its test file is what an author keeps, so it must run as it stands."""
    pytest.importorskip("torch", reason="the template's device needs it: pip install torch")
    code = f"import sys, pytest; sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', {str(TEMPLATE / kind)!r}]))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(TEMPLATE / kind), os.environ.get("PYTHONPATH", "")]),
            "HYPOTHESIS_STORAGE_DIRECTORY": str(tmp_path),
        },
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout


def test_the_observer_writes_a_line_of_json_for_each_request(site, tmp_path, monkeypatch):
    reports = tmp_path / "reports.jsonl"
    monkeypatch.setenv("BLENDHUB_REPORTS", str(reports))
    site.install("json-lines", (TEMPLATE / "observer" / "json_lines.py").read_text())
    observers = Observers(site.host().observers())
    counts = (
        "prompt_tokens",
        "engine_tokens",
        "exact_tokens",
        "settled_tokens",
        "moved_tokens",
        "recomputed_tokens",
        "hole_tokens",
        "generation",
    )
    done = [msgspec.convert(dict.fromkeys(counts, n) | {"request": f"r{n}"}, RequestReport) for n in range(3)]
    for report in done:
        observers.request_done(report)
    assert observers.engine_stopping() and not observers.errors
    assert [msgspec.json.decode(line, type=RequestReport) for line in reports.read_bytes().splitlines()] == done


def test_the_template_offers_what_its_table_says():
    assert {folder.name for folder in TEMPLATE.iterdir() if folder.is_dir()} == set(NAMES)
    assert not {name for kind, name in NAMES.items() if name in PluginHost.discover().names(kind)}
