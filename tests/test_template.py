"""Each folder of the template is a whole distribution: copied alone, installed, found and proven."""

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import blendhub.contracts
from blendhub import PluginHost
from blendhub.testing.transports.base import EchoService, Running, check_echo, client_codec
from harness.waiting import wait_until

TEMPLATE = Path(__file__).parent.parent / "examples" / "plugin-template"
NAMES = {
    "matcher": "ngram",
    "selector": "edges",
    "device": "plain",
    "transport": "unix",
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


def run(path: Path, *command: str, **more: str) -> "subprocess.CompletedProcess[str]":
    """Python's result of a command with this place first on its path."""
    paths = os.pathsep.join([str(path), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths} | more
    return subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_installed_folders_are_listed_and_judged_by_their_names(tmp_path):
    """The whole suites run in the folders' own tests; here, what shows that the command finds a plugin."""
    assert {folder.name for folder in TEMPLATE.iterdir() if folder.is_dir()} == set(NAMES)
    assert not {name for kind, name in NAMES.items() if name in PluginHost.discover().names(kind)}
    site = install_template(tmp_path)
    listed = json.loads(run(site, "-m", "blendhub.cli", "plugins", "--json").stdout)
    ours = [plugin for plugin in listed if plugin["distribution"].startswith("blendhub-example")]
    assert {plugin["kind"]: plugin["name"] for plugin in ours} == NAMES
    assert all(plugin["available"] for plugin in ours)
    contracts = "".join(file.read_text() for file in Path(blendhub.contracts.__file__).parent.glob("*.py"))
    defined = {*re.findall(r"apabilit(?:y|ies\.\*) ``(\w+)``", contracts)}
    assert {word for plugin in listed for word in plugin["capabilities"]} <= defined
    assert all(plugin["distribution"] == f"blendhub-example-{plugin['kind']}" for plugin in ours)
    judged = ["conformance", "matcher", "ngram", "--options", '{"window_tokens": 16}', "-k", "refuses"]
    done = run(site, "-m", "blendhub.cli", *judged)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 failed" in done.stdout and " 0 passed" not in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in NAMES if kind != "observer"])
def test_the_folder_s_own_tests_pass(tmp_path, kind):
    """Its test file is what an author keeps, so it must run as it stands; an observer's is test_engine_plugins.py."""
    pytest.importorskip("torch", reason="the template's device needs it: pip install torch")
    tests = ["-q", "-p", "no:cacheprovider", str(TEMPLATE / kind)]
    done = run(TEMPLATE / kind, "-P", "-m", "pytest", *tests, HYPOTHESIS_STORAGE_DIRECTORY=str(tmp_path))
    assert done.returncode == 0, done.stdout


def test_the_template_s_server_tells_its_service_which_client_left(tmp_path, monkeypatch):
    """No transport must, so the suite of transports does not ask for it."""
    monkeypatch.syspath_prepend(TEMPLATE / "transport")
    transport = PluginHost([EntryPoint("unix", "unix_transport", "blendhub")]).create("transport", "unix")
    server = Running(transport, transport.private_endpoint(tmp_path), EchoService())
    try:
        left, other = (transport.connect(server.endpoint, client_codec()) for _ in range(2))
        for connection in (left, other):
            check_echo(connection, "hello")
        left.close()
        wait_until(lambda: server.service.peers_gone == server.service.peers[:1], 5.0)
        check_echo(other, "still here")
        other.close()
    finally:
        server.stop()
