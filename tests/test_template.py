"""Each folder of the template is a whole distribution: copied alone, installed, found and proven."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from blendhub import PluginHost
from blendhub.framework.observers import Observers
from blendhub.outcome.report import Outcome

TEMPLATE = Path(__file__).parent.parent / "examples" / "plugin-template"
NAMES = {
    "matcher": "ngram",
    "selector": "edges",
    "device": "plain",
    "observer": "json_lines",
}


def install_template(folder: Path) -> Path:
    """Install a copy of each folder beside what is installed here; returns what to put on the path."""
    site = folder / "site"
    copies = [shutil.copytree(TEMPLATE / kind, folder / f"my-{kind}") for kind in NAMES]
    # What they need is installed here already, and so is their build backend: no network, no second environment.
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target", str(site)]
    subprocess.run([sys.executable, *install, *map(str, copies)], check=True, capture_output=True, text=True)
    return site


@pytest.mark.slow
def test_installed_folders_are_listed_and_judged_by_their_names(tmp_path):
    """The whole suites run in the folders' own tests; here, what shows that the command finds a plugin."""
    site = install_template(tmp_path)
    path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])

    def blendhub(*arguments: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "blendhub.cli", *arguments]
        return subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)

    listed = json.loads(blendhub("plugins", "--json").stdout)
    ours = [plugin for plugin in listed if plugin["distribution"].startswith("blendhub-example")]
    assert {plugin["kind"]: plugin["name"] for plugin in ours} == NAMES
    assert all(
        plugin["available"] and plugin["distribution"] == f"blendhub-example-{plugin['kind']}" for plugin in ours
    )
    done = blendhub("conformance", "matcher", "ngram", "--options", '{"window_tokens": 16}', "-k", "refuses")
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 failed" in done.stdout and " 0 passed" not in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in NAMES if kind != "observer"])
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
    done = [Outcome(request=f"r{n}", prompt_tokens=n, engine_tokens=0) for n in range(3)]
    for outcome in done:
        observers.request_done(outcome)
    assert observers.engine_stopping() and not observers.errors
    assert [msgspec.json.decode(line, type=Outcome) for line in reports.read_bytes().splitlines()] == done


def test_the_template_offers_what_its_table_says():
    assert {folder.name for folder in TEMPLATE.iterdir() if folder.is_dir()} == set(NAMES)
    assert not {name for kind, name in NAMES.items() if name in PluginHost.discover().names(kind)}
