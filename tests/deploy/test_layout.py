"""Hub and engine in namespaces, as containers have them: what they must share, and what happens if they do not.

Each has its own mounts, processes, network and IPC, and runs as the user of its image. The engine is a client that
stores KV and reads it. The hub has no store, and both run this environment's packages, not those of the images.
The compose file's containers have the same users, paths and volume, which ``test_manifests.py`` compares.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.deploy.deployment import ROOT, entrypoint, of_kubernetes, variables_of
from tests.hub.processes import python_of, until
from tests.namespaces import skip_unless_permitted

pytestmark = pytest.mark.slow

HUB, ENGINE = of_kubernetes("DaemonSet"), of_kubernetes("Deployment")
ADDRESS = "192.0.2.1"
CONFIG = ROOT / "deploy" / "hub.toml"
OWN = ("unshare", "--mount", "--net", "--ipc", "--uts", "--pid", "--fork", "--mount-proc")
# The user may read the checkout wherever it lies, and write nothing of others.
SETUP = """set -e
ip link set lo up && ip address add $ADDRESS/32 dev lo
if [ -n "$VOLUME" ]; then mount --bind "$VOLUME" /dev/shm; else mount -t tmpfs tmpfs /dev/shm; fi
exec setpriv --reuid "$AS" --regid "$AS" --clear-groups --inh-caps +dac_read_search --ambient-caps +dac_read_search "$@"
"""
CLIENT = """
import contextlib, json, sys
from blendhub.client.hub_client import HubClient
from blendhub.core.errors import BlendHubError, PeerGone, StaleEpoch
from blendhub.core.plugin_choice import PluginChoice
from tests.hub.hub_direct import namespace, tokens
from tests.hub.processes import check, store

client = HubClient(sys.argv[1])
try:
    client.register("engine", namespace(matchers=(PluginChoice("prefix"),)), rank=0)
except BlendHubError as error:
    sys.exit(print(json.dumps(str(error))))
print(json.dumps("mapped"), flush=True)
while sys.stdin.readline():
    read = None
    while read is None:
        with contextlib.suppress(PeerGone, StaleEpoch):  # until the next hub is there, and knows this session
            store(client, tokens(1, 96))
            read = check(client, tokens(1, 96))
    print(json.dumps(read), flush=True)
"""


class Machine:
    """Runs commands, each as in a container; some share a volume."""

    def __init__(self, home: Path, volume: Path) -> None:
        self._home = home  # keeps compiled matchers from one test to the next
        # By its silence alone the hub knows that a process of another container has ended.
        self._config = home / "hub.toml"
        self._config.write_text(f"silence_s = 4.0\n{CONFIG.read_text()}")
        self.volume = volume
        """Memory that containers share, as a volume does that is a tmpfs."""
        self._begun: list[subprocess.Popen] = []

    def begin(self, command: list[str], user: int, volume: Path | None) -> subprocess.Popen:
        about = {"AS": str(user), "VOLUME": str(volume or ""), "ADDRESS": ADDRESS, "HOME": str(self._home)}
        begun = subprocess.Popen(
            [*OWN, "sh", "-c", SETUP, "sh", *command],
            cwd=ROOT,
            env=os.environ | variables_of("hub") | about,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._begun.append(begun)
        return begun

    def hub(self, *more: str) -> subprocess.Popen:
        """The hub of the image with this environment's program, a small arena and without a store."""
        program, *arguments = entrypoint("hub")
        assert program == "blendhub"
        arguments = [str(self._config) if argument == "/etc/blendhub/hub.toml" else argument for argument in arguments]
        own = [argument for argument in HUB.arguments if not argument.startswith(("--arena-gib", "--store"))]
        command = [sys.executable, "-m", "blendhub.cli", *arguments, *own, "--arena-gib=0.05", *more]
        process = self.begin(command, HUB.user, self.volume)
        assert any("--kv-transfer-config" in line for line in process.stdout), "the hub did not start"
        return process

    def engine(self, endpoint: str, user: int, volume: Path | None) -> tuple[subprocess.Popen, str]:
        """A client as an engine is one, and what became of its registration."""
        engine = self.begin([sys.executable, "-c", CLIENT, endpoint], user, volume)
        return engine, json.loads(engine.stdout.readline())

    @staticmethod
    def kill(process: subprocess.Popen) -> None:
        # Not by `--kill-child`, which no longer works after the change of the user.
        with suppress(IndexError, FileNotFoundError, ProcessLookupError):  # it has ended
            os.kill(python_of(process), signal.SIGKILL)
        process.communicate()

    def close(self) -> None:
        for process in self._begun:
            if process.poll() is None:
                self.kill(process)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    home.chmod(0o777)
    return home


@pytest.fixture
def machine(home: Path) -> Iterator[Machine]:
    skip_unless_permitted([*OWN, "sh", "-c", 'ip link set lo up && setpriv --reuid 1 "$0"'])
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="volume-") as volume:
        Path(volume).chmod(0o1777)
        made = Machine(home, Path(volume))
        yield made
        made.close()


def store_and_read(engine: subprocess.Popen) -> int:
    """How many tokens the engine reads that it has stored."""
    engine.stdin.write("go\n")
    engine.stdin.flush()
    return int(engine.stdout.readline())


def fetched(hub: subprocess.Popen, path: str) -> str:
    """What the hub's port answers at an address other than loopback, as Prometheus and the probes ask."""
    code = f"import urllib.request; print(urllib.request.urlopen('http://{ADDRESS}:9464/{path}').read().decode())"
    enter = ["nsenter", "--net", f"--target={python_of(hub)}", sys.executable, "-c", code]
    return subprocess.run(enter, capture_output=True, text=True, check=True).stdout


def test_containers_that_share_the_volume_share_kv_and_a_hub_that_returns_is_found(machine):
    hub = machine.hub()
    engine, outcome = machine.engine(ENGINE.endpoint, ENGINE.user, machine.volume)
    assert outcome == "mapped" and store_and_read(engine) == 96
    assert fetched(hub, "healthz") == "ok\n\n" and "\nblendhub_sessions 1.0\n" in fetched(hub, "metrics")
    machine.kill(hub)
    hub = machine.hub()
    assert store_and_read(engine) == 96
    assert len(list(machine.volume.glob("blendhub-*"))) == 1, "the killed hub's arena is gone"
    machine.kill(engine)
    until(lambda: "\nblendhub_sessions 0.0\n" in fetched(hub, "metrics"))


def test_what_happens_without_what_the_table_in_operate_names(machine, tmp_path):
    """The first test shows what need not be shared."""
    user, volume, apart = ENGINE.user, machine.volume, ENGINE.endpoint.replace("/blendhub/", "/elsewhere/")
    os.chown(tmp_path, user, user)
    in_a_directory = f"ipc://{tmp_path}/hub.sock"  # which both have
    machine.hub()
    machine.hub(f"--endpoint={in_a_directory}")
    table = (ROOT / "docs" / "operate.md").read_text()
    for row, endpoint, as_user, memory, outcome in (
        ("`/dev/shm`", in_a_directory, user, None, "cannot map the hub's arena"),
        ("the directory of the socket", apart, user, volume, "there is no socket /dev/shm/elsewhere/hub.sock"),
        ("the user", ENGINE.endpoint, user + 1, volume, "/dev/shm/blendhub/hub.sock cannot be reached (Permission"),
        ("the user", ENGINE.endpoint, 0, volume, "mapped"),  # root
    ):
        assert outcome in machine.engine(endpoint, as_user, memory)[1], row
        assert f"\n| {row} |" in table
