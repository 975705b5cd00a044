"""More idle connections than a process may open files: no hub ends of that, and a line names the limit."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from blendhub.client.hub_client import HubClient

pytestmark = pytest.mark.slow

IN_A_THREAD = """
import logging, sys, time
from blendhub.hub.config import HubConfig, Listen
from blendhub.hub.embedded import HubInThread

logging.basicConfig()
with HubInThread(HubConfig(arena_gib=0.01, listen=(Listen(endpoint=sys.argv[1]),), metrics="")) as hub:
    print("up", flush=True)
    with hub.connect() as engine:
        sys.stdin.read()  # as an engine that goes on meanwhile
        print(engine.stats().gauges["sessions"], flush=True)
"""
COMMANDS = {
    "process": lambda endpoint: ["-m", "blendhub.cli", "serve", "--endpoint", endpoint, "--arena-gib", "0.01"],
    "thread": lambda endpoint: ["-c", IN_A_THREAD, endpoint],
}
MANY = 1200


@pytest.fixture(params=["soft limit", "hard limit"])
def files(request) -> str:
    return "1024:" if request.param == "soft limit" else "1024:1024"


@pytest.fixture(params=sorted(COMMANDS))
def hub(request, files, tmp_path) -> Iterator[tuple[subprocess.Popen, str, Path]]:
    endpoint, log = f"ipc://{tmp_path}/hub.sock", tmp_path / "log"
    command = ["prlimit", f"--nofile={files}", sys.executable, *COMMANDS[request.param](endpoint)]
    with log.open("w") as errors:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True)
    assert process.stdout and process.stdout.readline()
    yield process, endpoint, log
    process.kill()
    process.wait()


def test_idle_connections_beyond_the_descriptors_end_no_hub(hub, files):
    process, endpoint, log = hub
    with ExitStack() as opened:
        for _ in range(MANY):
            one = opened.enter_context(socket.socket(socket.AF_UNIX))
            one.connect(endpoint.removeprefix("ipc://"))
        with HubClient(endpoint) as client:
            assert client.stats().gauges["sessions"] == 0
        assert process.poll() is None
        n_open = len(os.listdir(f"/proc/{process.pid}/fd"))
    said = log.read_text()
    if files == "1024:":
        assert n_open > MANY and "refused" not in said, "the soft limit was raised, and all of them fit"
    else:
        assert n_open < 900
        assert "connections, which sent no request, the last of process" in said
        assert "The limit: 1024 open files; raise the hard limit (ulimit -Hn, LimitNOFILE)" in said
    out, _ = process.communicate("", timeout=60) if "-c" in process.args else ("0", "")
    assert "0" in out
