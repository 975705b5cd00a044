"""Hub and engine in namespaces, as containers have them: what they must share, and what happens if they do not.

Each has its own mounts, processes, network and IPC, and runs as the user of its image. The engine is a client that
stores KV and reads it. The hub's store is not played; ``test_containerfile.py`` starts the image with one.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.namespaces import skip_unless_permitted
from tests.deploy.images import ROOT
from tests.deploy.layouts import Layout, of_compose, of_kubernetes
from tests.hub.processes import python_of, until

pytestmark = pytest.mark.slow

ADDRESS = "192.0.2.1"
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
from blendhub.core.errors import BlendHubError, PeerGone
from blendhub.core.plugin_choice import PluginChoice
from blendhub.core.spans import Span
from tests.hub.hub_direct import LAYOUT, marks, namespace, tokens
from tests.hub.mapped import check, store

def carry(text):
    reserved = client.reserve(text, Span(0, len(text)))
    shards = [marks(text, slot.span, 0).tobytes().ljust(LAYOUT.shard_bytes, b" ") for slot in reserved.slots]
    for slot, shard in zip(reserved.slots, shards):
        client.put(reserved.right, slot.span.start, shard)
    client.commit(reserved.right, len(text))
    found = client.lookup(text)
    read = client.submit_fetch(found.lease, [piece.shard for piece in found.pieces]).payload()
    assert list(map(bytes, read)) == shards
    return sum(len(piece.span) for piece in found.pieces)

def store_and_read(text):
    if client.arena is None:
        return "carried", carry(text)
    store(client, text)
    return "mapped", check(client, text)

client = HubClient(sys.argv[1])
try:
    client.register("engine", namespace(matchers=(PluginChoice("prefix"),)), rank=0)
    print(json.dumps(store_and_read(tokens(1, 96))), flush=True)
except BlendHubError as error:
    sys.exit(print(json.dumps([str(error), 0])))
while sys.stdin.readline():
    outcome = None
    while outcome is None:
        with contextlib.suppress(PeerGone):  # until the next hub is there
            outcome = store_and_read(tokens(1, 96))
    print(json.dumps(outcome), flush=True)
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

    def begin(command: list[str], user: int, volume: Path | None, **variables: str):
        about = {"AS": str(user), "VOLUME": str(volume or ""), "ADDRESS": ADDRESS, "HOME": str(home)}
        started = subprocess.Popen(
            [*OWN, "sh", "-c", SETUP, "sh", *command],
            cwd=ROOT,
            env=os.environ | about | variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        begun.append(started)
        return started

    yield begin
    for process in begun:
        if process.poll() is None:
            # Not by `--kill-child`, which no longer works after the change of the user.
            os.kill(python_of(process), signal.SIGKILL)
        process.communicate()


@pytest.fixture
def volume() -> Iterator[Path]:
    """Memory that containers share, as a volume does that is a tmpfs."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="volume-") as made:
        Path(made).chmod(0o1777)
        yield Path(made)


def start_hub(begin, layout: Layout, volume: Path, *more: str) -> subprocess.Popen:
    """The hub of the image, with a small arena and without the store of the container's disk."""
    hub = layout.hub
    given = [one for one in hub.arguments if not one.startswith(("--arena-gib", "--store"))]
    program, *command = [
        str(ROOT / "deploy/hub.toml") if one.endswith("hub.toml") else one for one in hub.image.command
    ]
    assert program == "blendhub"
    runtime = hub.image.variables["XDG_RUNTIME_DIR"]
    command = [sys.executable, "-m", "blendhub.cli", *command, *given, "--arena-gib=0.05", *more]
    process = begin(command, hub.user, volume, XDG_RUNTIME_DIR=runtime)
    assert any("--kv-transfer-config" in line for line in process.stdout), "the hub did not start"
    return process


def start_engine(begin, endpoint: str, user: int, volume: Path | None) -> subprocess.Popen:
    return begin([sys.executable, "-c", CLIENT, endpoint], user, volume)


def heard(engine: subprocess.Popen) -> Any:
    return json.loads(engine.stdout.readline())


def in_container(process: subprocess.Popen, user: int, *command: str) -> str:
    """What a command prints that runs beside the process, as ``docker exec`` would run it."""
    enter = ["nsenter", "--all", "--target", str(python_of(process)), f"--wd={ROOT}"]
    as_user = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
    as_user += ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    return subprocess.run([*enter, *as_user, *command], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("layout", [of_compose(), of_kubernetes()], ids=["compose", "kubernetes"])
def test_containers_that_share_the_volume_share_kv_and_a_hub_that_returns_is_found(begin, volume, layout):
    assert list(layout.shared) == ["/dev/shm"], "the only volume that is mounted into both"
    assert layout.hub.user == layout.engine.user == layout.hub.image.user == layout.engine.image.user != 0
    hub = start_hub(begin, layout, volume)
    engine = start_engine(begin, layout.engine.endpoint, layout.engine.user, volume)
    assert heard(engine) == ["mapped", 96]
    # The image's health check, and Prometheus' and the probes' way from outside: not by the loopback address.
    variables = [f"{name}={value}" for name, value in layout.hub.image.variables.items() if name != "PATH"]
    program, *checked = layout.hub.image.health
    assert program == "blendhub"
    in_container(hub, layout.hub.user, "env", *variables, sys.executable, "-m", "blendhub.cli", *checked)
    fetch = f"import urllib.request; print(urllib.request.urlopen('http://{ADDRESS}:9464/'+'%s').read().decode())"
    assert in_container(hub, layout.hub.user, sys.executable, "-c", fetch % "healthz") == "ok\n\n"

    def sessions() -> str:
        metrics = in_container(hub, layout.hub.user, sys.executable, "-c", fetch % "metrics")
        return next(line for line in metrics.splitlines() if line.startswith("blendhub_sessions "))

    assert sessions() == "blendhub_sessions 1.0"
    os.kill(python_of(hub), signal.SIGKILL)
    hub.wait()
    hub = start_hub(begin, layout, volume)
    engine.stdin.write("again\n")
    engine.stdin.flush()
    assert heard(engine) == ["mapped", 96]
    assert len(list(volume.glob("blendhub-*"))) == 1, "the killed hub's arena is gone"
    os.kill(python_of(engine), signal.SIGKILL)
    until(lambda: sessions() == "blendhub_sessions 0.0")


@pytest.mark.parametrize(
    "missing, expected, found",
    [
        ("`/dev/shm`", "carried", 96),
        ("the directory of the socket", "there is no socket /dev/shm/elsewhere/hub.sock", 0),
        ("the user", "/dev/shm/blendhub/hub.sock cannot be reached (Permission denied)", 0),
        ("the user: the engine is root", "mapped", 96),
    ],
    ids=["memory", "socket", "user", "root"],
)
def test_what_happens_without(begin, volume, tmp_path, missing, expected, found):
    """The rows of the table in ``docs/operate.md``; what its other rows name is not shared in the test above."""
    layout = of_kubernetes()
    endpoint, user, memory, more = layout.engine.endpoint, layout.engine.user, volume, []
    if missing == "`/dev/shm`":
        # The socket lies in a directory that both have.
        os.chown(tmp_path, user, user)
        endpoint, memory = f"ipc://{tmp_path}/hub.sock", None
        more = [f"--endpoint={endpoint}"]
    elif missing == "the directory of the socket":
        endpoint = endpoint.replace("/blendhub/", "/elsewhere/")
    else:
        user = 0 if "root" in missing else user + 1
    start_hub(begin, layout, volume, *more)
    outcome, n_tokens = heard(start_engine(begin, endpoint, user, memory))
    assert expected in outcome and n_tokens == found
    assert f"\n| {missing.partition(':')[0]} |" in (ROOT / "docs" / "operate.md").read_text()
