"""``blendhub check`` where something is wrong with memory, a hub or what is installed, and what it says that mends it.

Each fault is made: most in a mount namespace, or in distributions and directories that come first on the path.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from blendhub import API_VERSION
from blendhub.cli.checks import versions
from blendhub.client.hub_client import HubClient
from blendhub.client.wire import Request
from blendhub.contracts import Codec
from blendhub.core.layout import KVLayout, Namespace
from blendhub.core.spans import Span
from blendhub.hub.config import HubConfig, Listen
from blendhub.hub.embedded import HubInThread
from blendhub.hub.memory.default_size import available_bytes
from blendhub.system.served_vllm import NUMA, WITHOUT_VISION, lacks_numa, server_command, transfer_config
from tests.hub.processes import HubProcess
from tests.namespaces import skip_unless_permitted

pytestmark = pytest.mark.slow

CHECK = [sys.executable, "-m", "blendhub.cli", "check", "--json"]
LAYOUT = KVLayout(layers=1, kv_heads=8, key_dim=64, value_dim=64, dtype="float16", chunk_tokens=256)
ABSENT = f"""
    from blendhub import PluginSpec, Unavailable, hookimpl

    @hookimpl
    def blendhub_devices():
        probe = lambda: Unavailable("no such card", "pip install a-card")
        return [PluginSpec(name="odd", api={API_VERSION}, summary="a device", factory=object, probe=probe)]
"""


FITTING_TORCH = """
from types import SimpleNamespace

__version__, version = "2.13.0", SimpleNamespace(cuda=None, hip=None)
"""
"""What the check asks of a torch for CPUs. It is imported in no time."""


class Report(NamedTuple):
    code: int
    findings: list[dict[str, Any]]

    def only(self, verdict: str) -> dict[str, Any]:
        """The one finding with this verdict, which is the worst."""
        assert self.code == {"ok": 0, "fail": 1, "warn": 3}[verdict], self
        (finding,) = [finding for finding in self.findings if finding["verdict"] == verdict]
        return finding


class Checker:
    """One of the checks, with its user's directories in a place that is new for each test."""

    def __init__(self, home: Path) -> None:
        self.home = home

    def __call__(
        self, check: str, *arguments: str, within: Sequence[str] = (), path: object = "", **environment: str
    ) -> Report:
        """``path``: what comes first on Python's."""
        paths = os.pathsep.join([str(path), os.environ.get("PYTHONPATH", "")]).strip(os.pathsep)
        everything = {**os.environ, "XDG_RUNTIME_DIR": str(self.home), "PYTHONPATH": paths, **environment}
        command = [*within, *CHECK, "--only", check, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=everything, timeout=250)
        assert done.stdout, done.stderr
        return Report(done.returncode, json.loads(done.stdout))

    def mends(self, check: str, *arguments: str, within: Sequence[str]) -> dict[str, Any]:
        """The worst finding. Following its command, in the place where it was given, leaves none of that verdict."""
        before = self(check, *arguments, within=within)
        finding = min(before.findings, key=lambda finding: ("fail", "warn", "ok").index(finding["verdict"]))
        assert finding["command"], before
        after = self(check, *arguments, within=[*within, "bash", "-c", f'{finding["command"]} && exec "$@"', "sh"])
        assert finding["verdict"] not in {left["verdict"] for left in after.findings}, after
        return finding

    def toml(self, text: str) -> str:
        """A configuration of a hub."""
        (self.home / "hub.toml").write_text(text)
        return str(self.home / "hub.toml")


@pytest.fixture
def check() -> Iterator[Checker]:
    # The path of a Unix socket is short, and so must this be.
    with tempfile.TemporaryDirectory(prefix="check-", dir="/tmp") as home:
        yield Checker(Path(home))


@pytest.fixture
def elsewhere() -> Callable[[str], list[str]]:
    """Makes commands that run others in a mount namespace, after a script."""
    skip_unless_permitted(["unshare", "--mount"])
    return lambda script: ["unshare", "--mount", "bash", "-c", f'set -e; {script}; exec "$@"', "sh"]


@pytest.mark.parametrize(
    "options, config, verdict, sentence",
    [
        ("size=64m,huge=advise", "", "warn", "0.06 GiB free, so an arena would have 0.03 GiB only"),
        ("size=64m", "arena_gib = 0.5", "fail", "less than the configured arena of 0.50 GiB"),
        ("size=8g,ro", "", "fail", "cannot create files"),
        ("size=1g", "arena_gib = 0.5", "warn", "no huge pages"),
    ],
    ids=["small", "smaller than the arena", "read-only", "small pages"],
)
def test_shared_memory_is_mounted_as_the_advice_says(check, elsewhere, options, config, verdict, sentence):
    if "[force]" in Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled").read_text():
        pytest.skip("this kernel forces huge pages on every file system in memory")
    within = elsewhere(f"mount -t tmpfs -o {options} tmpfs /dev/shm")
    finding = check.mends("shared-memory", check.toml(config), within=within)
    assert finding["verdict"] == verdict and sentence in finding["sentence"]
    assert finding["command"].startswith("mount -o remount,")


def test_shared_memory_on_a_disk_or_nowhere_is_mounted_and_an_arena_above_all_memory_fails(check, elsewhere):
    (check.home / "disk").mkdir()
    finding = check.mends("shared-memory", within=elsewhere(f"mount --bind {check.home}/disk /dev/shm"))
    assert finding["verdict"] == "fail" and "is not in memory, but on" in finding["sentence"]
    devices = check.home / "dev"
    devices.mkdir()
    for name in ("null", "urandom"):
        os.mknod(devices / name, os.stat("/dev/null").st_mode, os.stat(f"/dev/{name}").st_rdev)
    finding = check.mends("shared-memory", within=elsewhere(f"mount --bind {devices} /dev"))
    assert finding["verdict"] == "fail" and "/dev/shm does not exist" in finding["sentence"]
    flag = json.dumps(transfer_config({"hub": {"arena_gib": available_bytes() / 2**30 + 9}}))
    large = elsewhere("mount -t tmpfs -o size=4g,huge=advise tmpfs /dev/shm")
    assert "the kernel would kill the hub" in check("shared-memory", flag, within=large).only("fail")["sentence"]


def test_a_hub_that_does_not_run_fails_only_if_it_is_named_and_so_does_one_of_another_version(check, monkeypatch):
    assert "an engine embeds one" in check("hub").only("ok")["sentence"]
    where = f"ipc://{check.home}/other.sock"
    file = check.toml(f'[[listen]]\nendpoint = "{where}"')
    for arguments, flags in ((["--endpoint", where], f"--endpoint {where}"), ([file], f"--config {file}")):
        finding = check("hub", *arguments).only("fail")
        assert f"no hub answers at {where}" in finding["sentence"]
        assert finding["command"] == f"blendhub serve {flags}"
    # An engine opens the endpoints of its own hub, so no other hub may be there.
    own = json.dumps(transfer_config({"hub": {"listen": [{"endpoint": where}]}}))
    assert f"no hub runs at {where} yet: the engine embeds one" in check("hub", own).only("ok")["sentence"]
    with HubInThread(HubConfig(arena_gib=0.01, metrics="", listen=(Listen(endpoint=where),))):
        assert "name it as the endpoint" in check("hub", own).only("warn")["sentence"]
    monkeypatch.setattr("blendhub.client.wire.hub_codec", lambda: Codec(Request, version=999))
    with HubInThread(HubConfig(arena_gib=0.01, metrics="", listen=(Listen(endpoint=where),))):
        finding = check("hub", "--endpoint", where).only("fail")
    assert "speaks another version" in finding["sentence"] and finding["command"] == "pip install --upgrade blendhub"


def test_a_running_hub_is_reached_its_arena_mapped_and_its_numbers_read(check, elsewhere):
    hub = HubProcess(check.home)
    try:
        where = ["--endpoint", hub.endpoint]
        assert "its arena of 0.01 GiB can be mapped here" in check("hub", *where).only("ok")["sentence"]
        apart = elsewhere("mount -t tmpfs -o size=8m tmpfs /dev/shm")
        finding = check("hub", *where, within=apart).only("fail")
        assert "cannot be used: cannot map the hub's arena" in finding["sentence"]
        with HubClient(hub.endpoint) as client:
            client.register("an-engine", Namespace(model="m", layout=LAYOUT), rank=0)
            for number in range(30):  # each takes half a MiB of the 10
                tokens = np.full(LAYOUT.chunk_tokens, number, np.uint32)
                reserved = client.reserve(tokens, Span(0, len(tokens))).result()
                client.commit(reserved.right, len(tokens)).result()
        finding = check("hub", *where).only("warn")
        assert "chunks were evicted that no store had" in finding["sentence"]
        assert finding["command"] == "blendhub serve --arena-gib 1 --store DIR"
    finally:
        hub.kill()


def test_only_what_is_named_must_run_here_and_what_is_broken_always_fails(check, site):
    site.install("odd-device", ABSENT)
    report = check("plugins", path=site.path)
    assert report.code == 0, "nothing names what this machine cannot run"
    assert "device odd (no such card)" in report.findings[-1]["sentence"]
    for named in ([json.dumps(transfer_config({"device": {"name": "odd"}}))], ["--device", "odd"]):
        finding = check("plugins", *named, path=site.path).only("fail")
        assert "device: device odd cannot run here: no such card" in finding["sentence"]
        assert finding["command"] == "pip install a-card"
    site.install("broken-plugin", "import nowhere_to_be_found")
    finding = check("plugins", path=site.path).only("fail")
    assert "No module named 'nowhere_to_be_found'" in finding["sentence"]
    assert finding["command"] == "pip install --force-reinstall broken-plugin"


@pytest.mark.parametrize(
    "name, source, sentence, command",
    [
        ("vllm", "__version__ = '0.9.1'", "vLLM 0.9.1 of ", None),
        (
            "vllm",
            "import os; os.write(2, b'why'); os.abort()",
            "signal 6 ended it: why",
            None,
        ),
        # vLLM's build for CPUs brings a torchvision for another torch, and then cannot be imported.
        ("vllm", "raise RuntimeError('operator torchvision::nms does not exist')", "torchvision::nms", WITHOUT_VISION),
        ("torch", "raise ImportError('libcudart.so.13')", "torch cannot be imported: ImportError: libcudart", None),
    ],
    ids=["another", "crashing", "torchvision", "torch"],
)
def test_a_torch_or_a_vllm_that_does_not_fit_fails(check, tmp_path, name, source, sentence, command):
    for module, code in {"torch": FITTING_TORCH, name: source}.items():
        (tmp_path / module).mkdir()
        (tmp_path / module / "__init__.py").write_text(code)
    finding = check("versions", path=tmp_path).only("fail")
    assert sentence in finding["sentence"] and command in (None, finding["command"])


@pytest.mark.timeout(600)
def test_the_installed_versions_fit_unless_vllm_is_told_not_to_load_our_plugin(check, monkeypatch):
    pytest.importorskip("vllm", reason="vLLM is not installed; `make setup` installs it")
    report = check("versions")
    assert report.code == 0
    assert report.findings[-1]["sentence"].endswith(f" can run BlendHub; its server starts with: {server_command()}")
    monkeypatch.setenv("VLLM_PLUGINS", "lora_resolver")
    *_, finding = versions.imported()
    assert finding.verdict == "fail" and finding.command == "unset VLLM_PLUGINS"
    assert "VLLM_PLUGINS is 'lora_resolver'" in finding.sentence


@pytest.mark.timeout(600)
def test_without_the_library_of_vllms_operators_it_names_the_package(check, elsewhere):
    pytest.importorskip("vllm", reason="vLLM is not installed; `make setup` installs it")
    libraries = [*Path("/usr/lib").glob("*/libnuma.so.1"), *Path("/usr/lib64").glob("libnuma.so.1")]
    if not libraries or lacks_numa():
        pytest.skip(f"the library is not where distributions have it, or missing: {NUMA}")
    hidden = "; ".join(f"mount --bind /dev/null {library}" for library in libraries)
    finding = check("versions", within=elsewhere(hidden)).only("fail")
    assert finding["command"] == NUMA and "libnuma.so.1" in finding["sentence"]
