"""The commands that run and watch a hub, with real processes."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from blendhub.cli import READER_GONE, main
from blendhub.client.arena_view import SHM
from blendhub.client.hub_client import BASE, HubClient
from blendhub.core.layout import Variant
from blendhub.system.served_vllm import server_command
from tests.hub.hub_direct import CHUNK, namespace, tokens
from tests.hub.processes import store, until

pytestmark = pytest.mark.slow

BLENDHUB = [sys.executable, "-m", "blendhub.cli"]
SOON_S = 20.0
TEXT = tokens(1, CHUNK)


class Served:
    """A hub that `blendhub serve` runs, and what it printed when it was up."""

    def __init__(self, *flags: str) -> None:
        self.process = subprocess.Popen(
            [*BLENDHUB, "serve", "--arena-gib", "0.01", *flags],
            stdout=subprocess.PIPE,
            text=True,
            # The tests may run with the signal ignored, as nohup does, and a process would inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
        )

    def wait_until_up(self) -> "Served":
        self.screen = ""
        while "--kv-transfer-config" not in self.screen:
            line = self.process.stdout.readline()
            assert line, f"it did not start: {self.screen}"
            self.screen += line
        self.rows = dict(re.findall(r"^([a-z]+) +(.*)$", self.screen, re.M))
        assert server_command() in self.screen
        return self

    def stop(self, number: int = signal.SIGTERM) -> str:
        """The last words of a hub that ended well."""
        self.process.send_signal(number)
        words, _ = self.process.communicate(timeout=SOON_S)
        assert self.process.returncode == 0
        return words


@pytest.fixture
def serve() -> Iterator:
    started: list[Served] = []

    def start(*flags: str) -> Served:
        started.append(Served(*flags))
        return started[-1]

    yield start
    for served in started:
        served.process.kill()
        served.process.wait()


def test_a_reader_that_has_enough_is_no_fault():
    """The reader closes the pipe, as ``| head`` does, before the command has written to it."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([*BLENDHUB, "plugins", "--json"], stdout=writer, stderr=subprocess.PIPE, timeout=SOON_S)
    os.close(writer)
    assert done.stderr == b"" and done.returncode in (0, READER_GONE)


def store_a_chunk(endpoint: str, variant: Variant = BASE) -> None:
    with HubClient(endpoint) as client:
        client.register("an-engine", namespace(), rank=0)
        store(client, TEXT, variant=variant)
        assert client.lookup(TEXT, variant).result().matches[0].exact


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP], ids=lambda number: number.name)
def test_serve_answers_and_leaves_nothing_when_it_is_stopped(serve, tmp_path, number, capsys):
    endpoint = f"ipc://{tmp_path}/hub.sock"
    served = serve("--endpoint", endpoint).wait_until_up()
    assert served.rows["endpoint"] == endpoint and f'{{"blendhub": {{"endpoint": "{endpoint}"}}}}' in served.screen
    assert served.rows["arena"].startswith("10 MiB") and "rolling_hash" in served.rows["matchers"]
    for salt in ("one", "two"):
        store_a_chunk(endpoint, Variant(cache_salt=salt))
    assert main(["check", "--only", "hub", "--endpoint", endpoint]) == 0
    assert main(["forget", "--salt", "one", "--endpoint", endpoint]) == 0
    assert "\ndeleted: " in capsys.readouterr().out
    assert served.rows["metrics"].startswith("http://127.0.0.1:")
    metrics = httpx.get(served.rows["metrics"]).text
    assert '\nblendhub_request_seconds_count{kind="lookup"} 2.0\n' in metrics
    assert "\nblendhub_chunks_in_arena 1.0\n" in metrics
    assert "<!doctype html>" in httpx.get(served.rows["page"]).text
    segment = SHM / Path(served.rows["arena"]).name
    assert segment.exists()
    assert served.stop(number).endswith("\nstopped\n")
    assert not segment.exists() and list(tmp_path.iterdir()) == []


def test_without_an_endpoint_serve_and_other_commands_meet_and_without_a_hub_they_say_so_soon(
    serve, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("blendhub.cli.forget.ANSWER_S", 0.2)
    monkeypatch.setattr("blendhub.cli.explain.TIMEOUT_S", 0.2)
    for command in (["forget", "--salt", "one"], ["explain", "cmpl-9"]):
        assert main(command) == 2
        assert "is the hub running? Start it with: blendhub serve" in capsys.readouterr().err
    place = f"{tmp_path}/store"
    served = serve("--store", place).wait_until_up()
    assert served.rows["endpoint"] == f"ipc://{tmp_path}/blendhub/hub.sock"
    assert main(["check", "--only", "hub"]) == 0 and served.rows["endpoint"] in capsys.readouterr().out
    store_a_chunk(served.rows["endpoint"])
    served.stop()
    # The next one's readers leave at once.
    again = serve("--store", place)
    again.process.stdout.close()
    until(lambda: Path(tmp_path, "blendhub/hub.sock").exists())
    with HubClient(served.rows["endpoint"], timeout=SOON_S) as client:
        assert client.stats().result().gauges["chunks"] == 1
    again.process.terminate()
    assert again.process.wait(SOON_S) == 0


SLOW_START = """
import sys, time
from blendhub.cli import main
from blendhub.hub.stores.store_tier import StoreTier

StoreTier.restore = lambda tier: (print("begun", flush=True), time.sleep(60))
sys.exit(main(["serve", "--endpoint", sys.argv[1], "--arena-gib", "0.01", "--store", sys.argv[2]]))
"""


def test_a_start_that_takes_long_is_ended_at_once(tmp_path):
    command = [sys.executable, "-c", SLOW_START, f"ipc://{tmp_path}/hub.sock", str(tmp_path / "store")]
    starting = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert starting.stdout.readline() == "begun\n"
    opened = [Path(os.readlink(file)) for file in Path(f"/proc/{starting.pid}/fd").iterdir()]
    (segment,) = {path for path in opened if path.parent == SHM and path.name.startswith("blendhub-")}
    starting.send_signal(signal.SIGTERM)
    words, _ = starting.communicate(timeout=5)
    assert starting.returncode == 0 and words == "stopped before the hub was up\n"
    assert not segment.exists() and not (tmp_path / "hub.sock").exists()
