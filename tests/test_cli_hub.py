"""The commands that run and watch a hub, with real processes."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from blendhub.cli import READER_GONE, main
from blendhub.client.arena_view import SHM
from blendhub.client.hub_client import BASE, HubClient
from blendhub.core.layout import KVLayout, Namespace, Variant
from blendhub.core.spans import Span
from blendhub.system.served_vllm import server_command

pytestmark = pytest.mark.slow

BLENDHUB = [sys.executable, "-m", "blendhub.cli"]
SOON_S = 20.0
SPACE = Namespace(
    model="a-model",
    layout=KVLayout(layers=1, kv_heads=1, key_dim=4, value_dim=4, dtype="float16", chunk_tokens=128),
)


class Served:
    """A hub that `blendhub serve` runs, and what it printed when it was up."""

    def __init__(self, *flags: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            [*BLENDHUB, "serve", "--arena-gib", "0.01", *flags],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
            # The tests may run with the signal ignored, as nohup does, and a process would inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
        )

    def wait_until_up(self) -> None:
        lines = []
        for line in self.process.stdout:
            lines.append(line)
            if "--kv-transfer-config" in line:
                break
        self.screen = "".join(lines)
        self.rows = dict(re.findall(r"^([a-z]+) +(.*)$", self.screen, re.M))
        assert lines and lines[-1].startswith(server_command()), f"it did not start: {self.screen}"

    @property
    def segment(self) -> Path:
        return SHM / Path(self.rows["arena"]).name

    def stop(self, number: int = signal.SIGTERM) -> str:
        """The last words of a hub that ended well."""
        self.process.send_signal(number)
        words, _ = self.process.communicate(timeout=SOON_S)
        assert self.process.returncode == 0
        return words


@pytest.fixture
def serve(tmp_path) -> Iterator:
    started: list[Served] = []

    def start(*flags: str, **environment: str) -> Served:
        flags = flags or ("--endpoint", f"ipc://{tmp_path}/hub.sock")
        started.append(Served(*flags, **environment))
        started[-1].wait_until_up()
        return started[-1]

    yield start
    for served in started:
        if served.process.poll() is None:
            served.process.terminate()
        served.process.communicate(timeout=SOON_S)


def test_a_reader_that_has_enough_is_no_fault():
    """The reader closes the pipe, as ``| head`` does, before the command has written to it."""
    for command in (["serve", "--print-config"], ["plugins", "--json"]):
        reader, writer = os.pipe()
        os.close(reader)
        done = subprocess.run([*BLENDHUB, *command], stdout=writer, stderr=subprocess.PIPE, timeout=SOON_S)
        os.close(writer)
        assert done.stderr == b"" and done.returncode in (0, READER_GONE), (command, done)


def store_a_chunk(endpoint: str, variant: Variant = BASE) -> None:
    """And find it, where it was and behind other text."""
    tokens = np.arange(128, dtype=np.uint32)
    with HubClient(endpoint) as client:
        client.register("an-engine", SPACE, rank=0)
        reserved = client.reserve(tokens, Span(0, 128), variant)
        with client.writing(reserved.right):
            client.shard(reserved.slots[0].slot)[:] = 7
        client.commit(reserved.right, 128)
        assert client.lookup(tokens, variant).result().matches[0].exact
        assert client.lookup(np.concatenate([tokens[:0:-1], tokens]), variant).result().matches


def test_what_a_salt_stored_is_forgotten_by_the_command_and_over_http(serve, capsys):
    served = serve()
    endpoint = served.rows["endpoint"]
    store_a_chunk(endpoint, variant=Variant(cache_salt="one"))
    store_a_chunk(endpoint, variant=Variant(cache_salt="two"))
    assert main(["forget", "--salt", "one", "--endpoint", endpoint]) == 0
    assert capsys.readouterr().out.startswith("deleted: ")
    with HubClient(endpoint) as client:
        assert client.stats().gauges["chunks"] == 1
        url = served.rows["metrics"].removesuffix("/metrics") + "/kv?salt=two"
        with urllib.request.urlopen(urllib.request.Request(url, method="DELETE"), timeout=SOON_S) as answer:
            assert answer.status == 200
        assert client.stats().gauges["chunks"] == 0


def test_a_deletion_without_a_hub_says_so_soon(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("blendhub.cli.forget.ANSWER_S", 0.2)
    begun = time.monotonic()
    assert main(["forget", "--salt", "one", "--endpoint", f"ipc://{tmp_path}/none.sock"]) == 2
    assert "is the hub running?" in capsys.readouterr().err and time.monotonic() - begun < SOON_S


def page(served: Served, path: str) -> str:
    with urllib.request.urlopen(served.rows["metrics"].removesuffix("/metrics") + path, timeout=SOON_S) as answer:
        return answer.read().decode()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP], ids=lambda number: number.name)
def test_serve_answers_and_leaves_nothing_when_it_is_stopped(serve, tmp_path, number):
    served = serve()
    endpoint = f"ipc://{tmp_path}/hub.sock"
    assert served.rows["endpoint"] == endpoint and f'{{"blendhub": {{"endpoint": "{endpoint}"}}}}' in served.screen
    assert served.rows["arena"].startswith("10 MiB") and "rolling_hash" in served.rows["matchers"]
    store_a_chunk(endpoint)
    assert main(["check", "--only", "hub", "--endpoint", endpoint]) == 0
    assert served.segment.exists()
    assert served.stop(number).endswith("\nstopped\n")
    assert not served.segment.exists() and list(tmp_path.iterdir()) == []


SLOW_START = """
import sys, time
from blendhub.cli import main
from blendhub.hub.stores.store_tier import StoreTier

StoreTier.restore = lambda tier: (open(sys.argv[1], "w").close(), time.sleep(60))
sys.exit(main(["serve", "--endpoint", sys.argv[2], "--arena-gib", "0.01", "--store", sys.argv[3]]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_start_that_takes_long_is_ended_at_once(tmp_path, number):
    begun = tmp_path / "begun"
    arguments = [str(begun), f"ipc://{tmp_path}/hub.sock", str(tmp_path / "store")]
    starting = subprocess.Popen([sys.executable, "-c", SLOW_START, *arguments], stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + SOON_S
    while not begun.exists():
        assert time.monotonic() < deadline and starting.poll() is None
        time.sleep(0.005)
    segments = arenas_of(starting)
    starting.send_signal(number)
    words, _ = starting.communicate(timeout=5)
    assert starting.returncode == 0 and words == "stopped before the hub was up\n"
    assert segments and not any(path.exists() for path in segments) and not (tmp_path / "hub.sock").exists()


def arenas_of(process: subprocess.Popen) -> list[Path]:
    """The segments that a process has open."""
    opened = []
    for entry in Path(f"/proc/{process.pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            opened.append(entry.readlink())
    return [path for path in opened if path.parent == SHM and path.name.startswith("blendhub-") and path.exists()]


def test_what_is_stored_is_there_after_a_restart(serve, tmp_path):
    flags = ["--endpoint", f"ipc://{tmp_path}/hub.sock", "--store", str(tmp_path / "store")]
    served = serve(*flags)
    store_a_chunk(served.rows["endpoint"])
    served.stop()
    again = serve(*flags)
    assert again.rows["store"] == f"disk in {tmp_path}/store, 1 chunks restored"
    assert again.rows["models"] == "a-model"


def test_what_a_killed_hub_left_is_gone_when_the_next_one_runs(serve, tmp_path):
    killed = serve()
    killed.process.kill()
    killed.process.wait()
    assert killed.segment.exists() and (tmp_path / "hub.sock").exists()
    again = serve()
    assert not killed.segment.exists() and again.segment.exists()
    assert main(["check", "--only", "hub", "--endpoint", again.rows["endpoint"]]) == 0
    again.stop()
    assert list(tmp_path.iterdir()) == []


def test_health_and_metrics_answer_on_loopback(serve):
    served = serve()
    store_a_chunk(served.rows["endpoint"])
    assert served.rows["metrics"].startswith("http://127.0.0.1:")
    assert page(served, "/healthz") == "ok\n"
    assert served.rows["page"] + "metrics" == served.rows["metrics"] and "<!doctype html>" in page(served, "/")
    metrics = page(served, "/metrics")
    assert '\nblendhub_request_seconds_count{kind="lookup"} 2.0\n' in metrics
    assert "\nblendhub_chunks_in_arena 1.0\n" in metrics
    with pytest.raises(urllib.error.HTTPError, match="404"):
        page(served, "/else")


def test_without_an_endpoint_serve_and_other_commands_meet(serve, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    served = serve("--arena-gib", "0.01")
    assert served.rows["endpoint"] == f"ipc://{tmp_path}/blendhub/hub.sock"
    assert main(["check", "--only", "hub"]) == 0 and served.rows["endpoint"] in capsys.readouterr().out


def test_a_hub_whose_readers_are_gone_serves_on_and_ends_well(tmp_path):
    endpoint = f"ipc://{tmp_path}/hub.sock"
    served = subprocess.Popen(
        [*BLENDHUB, "serve", "--arena-gib", "0.01", "--endpoint", endpoint],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    served.stdout.close()
    try:
        until = time.monotonic() + SOON_S
        while not Path(endpoint.removeprefix("ipc://")).exists() and time.monotonic() < until:
            time.sleep(0.01)
        with HubClient(endpoint, timeout=SOON_S) as client:
            client.stats()
        served.terminate()
        assert served.wait(SOON_S) == 0
        # Other tests kill hubs meanwhile, whose memory this one removes.
        assert [line for line in served.stderr if b"removed the shared memory of killed hubs" not in line] == []
    finally:
        served.kill()
        served.wait()
        served.stderr.close()
