"""Hub and engine in namespaces, as containers have them: what they must share, and what happens if they do not.

Each has its own mounts, processes, network and IPC, and runs as the user of its image. The engine is a client that
stores KV and reads it. The hub's store is not played; ``test_containerfile.py`` starts the image with one.
The compose file's containers have the same users, paths and volume, which ``test_manifests.py`` compares.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from harness.namespaces import skip_unless_permitted
from tests.deploy.images import ROOT, command_of, variables_of
from tests.deploy.layouts import of_kubernetes
from tests.hub.processes import python_of, until

pytestmark = pytest.mark.slow

HUB, ENGINE = of_kubernetes()
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


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keeps compiled matchers from one test to the next."""
    folder = tmp_path_factory.mktemp("home")
    folder.chmod(0o777)
    return folder


@pytest.fixture
def begin(home: Path) -> Iterator[Callable[..., subprocess.Popen]]:
    """Starts commands, each as in a container; they end with the test."""
    skip_unless_permitted([*OWN, "sh", "-c", 'ip link set lo up && setpriv --reuid 1 "$0"'])
    begun: list[subprocess.Popen] = []

    def begin(command: list[str], user: int, volume: Path | None):
        about = {"AS": str(user), "VOLUME": str(volume or ""), "ADDRESS": ADDRESS, "HOME": str(home)}
        started = subprocess.Popen(
            [*OWN, "sh", "-c", SETUP, "sh", *command],
            cwd=ROOT,
            env=os.environ | variables_of("hub") | about,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        begun.append(started)
        return started

    yield begin
    for process in begun:
        kill(process)
        process.communicate()


def kill(process: subprocess.Popen) -> None:
    if process.poll() is None:
        # Not by `--kill-child`, which no longer works after the change of the user.
        with suppress(IndexError, ProcessLookupError):  # it ends just now
            os.kill(python_of(process), signal.SIGKILL)


@pytest.fixture
def volume() -> Iterator[Path]:
    """Memory that containers share, as a volume does that is a tmpfs."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="volume-") as made:
        Path(made).chmod(0o1777)
        yield Path(made)


def start_hub(begin, volume: Path, *more: str) -> subprocess.Popen:
    """The hub of the image with this environment's program, a small arena and without a store."""
    program, *arguments = command_of("hub", "ENTRYPOINT")
    assert program == "blendhub"
    arguments = [str(CONFIG) if argument == "/etc/blendhub/hub.toml" else argument for argument in arguments]
    own = [argument for argument in HUB.arguments if not argument.startswith(("--arena-gib", "--store"))]
    command = [sys.executable, "-m", "blendhub.cli", *arguments, *own, "--arena-gib=0.05", *more]
    process = begin(command, HUB.user, volume)
    assert any("--kv-transfer-config" in line for line in process.stdout), "the hub did not start"
    return process


def start_engine(begin, endpoint: str, user: int, volume: Path | None) -> tuple[subprocess.Popen, str]:
    """A client as an engine is one, and what became of its registration."""
    engine = begin([sys.executable, "-c", CLIENT, endpoint], user, volume)
    return engine, json.loads(engine.stdout.readline())


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


def test_containers_that_share_the_volume_share_kv_and_a_hub_that_returns_is_found(begin, volume):
    hub = start_hub(begin, volume)
    engine, outcome = start_engine(begin, ENGINE.endpoint, ENGINE.user, volume)
    assert outcome == "mapped" and store_and_read(engine) == 96
    assert fetched(hub, "healthz") == "ok\n\n" and "\nblendhub_sessions 1.0\n" in fetched(hub, "metrics")
    kill(hub)
    hub.wait()
    hub = start_hub(begin, volume)
    assert store_and_read(engine) == 96
    assert len(list(volume.glob("blendhub-*"))) == 1, "the killed hub's arena is gone"
    kill(engine)
    until(lambda: "\nblendhub_sessions 0.0\n" in fetched(hub, "metrics"))


@pytest.mark.parametrize(
    "missing, outcome",
    [
        ("`/dev/shm`", "cannot map the hub's arena"),
        ("the directory of the socket", "there is no socket /dev/shm/elsewhere/hub.sock"),
        ("the user", "/dev/shm/blendhub/hub.sock cannot be reached (Permission denied)"),
        ("the user: the engine is root", "mapped"),
    ],
    ids=["memory", "socket", "user", "root"],
)
def test_what_happens_without(begin, volume, tmp_path, missing, outcome):
    """The rows of the table in ``docs/operate.md``; what its other rows name is not shared in the test above."""
    endpoint, user, memory, more = ENGINE.endpoint, ENGINE.user, volume, []
    if missing == "`/dev/shm`":
        # The socket lies in a directory that both have.
        os.chown(tmp_path, user, user)
        endpoint, memory = f"ipc://{tmp_path}/hub.sock", None
        more = [f"--endpoint={endpoint}"]
    elif missing == "the directory of the socket":
        endpoint = endpoint.replace("/blendhub/", "/elsewhere/")
    else:
        user = 0 if "root" in missing else user + 1
    start_hub(begin, volume, *more)
    assert outcome in start_engine(begin, endpoint, user, memory)[1]
    assert f"\n| {missing.partition(':')[0]} |" in (ROOT / "docs" / "operate.md").read_text()
