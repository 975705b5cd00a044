"""What is wrong with hubs: with one that is started for a test of it, and with one that runs."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading

import numpy as np
import pytest

from blendhub import PluginHost
from blendhub.client.hub_client import HubClient
from blendhub.client.wire import Request
from blendhub.contracts import Codec, Envelope, Service
from blendhub.core.layout import KVLayout, Namespace
from blendhub.core.spans import Span
from tests.hub.processes import HubProcess

pytestmark = pytest.mark.slow

SELF_TEST = ["--only", "self-test"]
LAYOUT = KVLayout(layers=1, kv_heads=8, key_dim=64, value_dim=64, dtype="float16", chunk_tokens=256)


def test_a_hub_stores_and_gives_back(doctor, shm):
    report = doctor(*SELF_TEST, within=shm("size=1g"))
    assert "a hub stored 4,096 tokens and gave them back" in report.findings[0]["sentence"]


def test_no_room_for_a_hub_is_mended(doctor, shm):
    found = doctor.mends(*SELF_TEST, within=shm("size=8m"))
    assert found["verdict"] == "fail" and "no room for an arena" in found["sentence"]


def endpoint(where: str, *more: str) -> list[str]:
    return ["--only", "endpoint", "--endpoint", where, *more]


def test_an_endpoint_without_a_hub_fails(doctor):
    """Where nothing listens, and where something else listens, and a configuration of vLLM names it."""
    where = f"ipc://{doctor.home}/hub.sock"
    found = doctor(*endpoint(where)).only("fail")
    assert "no hub answers at ipc://~/hub.sock" in found["sentence"]
    assert found["command"] == "blendhub serve --endpoint ipc://~/hub.sock"
    flag = json.dumps({"kv_connector_extra_config": {"blendhub": {"endpoint": where}}})
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{doctor.home}/hub.sock")
        server.listen()
        assert "no hub answers" in doctor("--only", "endpoint", "--config", flag).only("fail")["sentence"]


class Newer(Service):
    """A hub of a later release: its messages have another version."""

    codec = Codec(Request, version=999)

    def handle(self, peer: bytes, request: Envelope) -> Envelope:
        return request


@pytest.fixture
def newer(doctor):
    loop, where = asyncio.new_event_loop(), f"ipc://{doctor.home}/hub.sock"
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    transport = PluginHost.discover().create("transport", "zmq")
    server = asyncio.run_coroutine_threadsafe(transport.serve(where, Newer()), loop).result(10)
    yield where
    asyncio.run_coroutine_threadsafe(server.close(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_a_hub_of_another_version_fails(doctor, newer):
    found = doctor(*endpoint(newer)).only("fail")
    assert "speaks another version" in found["sentence"] and found["command"] == "pip install --upgrade blendhub"


@pytest.fixture
def hub(doctor):
    running = HubProcess(doctor.home)
    yield running
    running.kill()


def test_a_running_hub_is_reached_and_its_arena_mapped(doctor, hub, shm):
    first, second = doctor(*endpoint(hub.endpoint)).findings
    assert first["verdict"] == second["verdict"] == "ok"
    assert "answers within" in first["sentence"] and "its arena of 0.01 GiB can be mapped here" in second["sentence"]
    found = doctor(*endpoint(hub.endpoint), within=shm("size=8m")).only("warn")
    assert "engines here cannot use its arena" in found["sentence"]


def test_a_hub_that_loses_kv_for_want_of_memory_is_a_warning(doctor, hub):
    with HubClient(hub.endpoint) as client:
        client.register("an-engine", Namespace(model="m", layout=LAYOUT), rank=0)
        for number in range(30):  # each takes half a MiB of the 10
            tokens = np.full(LAYOUT.chunk_tokens, number, np.uint32)
            reserved = client.reserve(tokens, Span(0, len(tokens)))
            client.commit(reserved.right, len(tokens))
    found = doctor(*endpoint(hub.endpoint)).only("warn")
    assert "chunks were evicted that no store had" in found["sentence"]
    assert found["command"] == "blendhub serve --arena-gib 1 --store DIR"


@pytest.mark.timeout(600)
def test_everything_is_examined_and_nothing_secret_is_told(doctor):
    """A key in place of its file's name, an address with a password, a salt: all of them come back in sentences."""
    settings = {
        "endpoint": "tcp://person:hunter22@127.0.0.1:1",
        "transport": {"name": "zmq", "options": {"secret_key": "7f188e5244b02bf497b86de417515cf4d4053ce4"}},
        "salt": "pepper-and-salt",
    }
    flag = {"kv_connector": "BlendHubConnector", "kv_role": "pepper-and-salt"}
    # Importing vLLM takes long, and other tests cover it.
    (doctor.home / "torch.py").write_text("raise ImportError('not here')")
    report = doctor(
        "--config",
        json.dumps({**flag, "kv_connector_extra_config": {"blendhub": settings}}),
        PYTHONPATH=os.pathsep.join([str(doctor.home), os.environ.get("PYTHONPATH", "")]),
    )
    assert report.code == 1
    assert {finding["check"] for finding in report.findings} >= {
        "plugins",
        "leftovers",
        "versions",
        "stores",
        "endpoint",
    }
    for secret in ("hunter22", "7f188e5244", "pepper-and-salt", str(doctor.home)):
        assert secret not in report.text


def test_in_a_terminal_each_line_has_its_verdict_and_what_mends_it(doctor, shm):
    ours, theirs = os.openpty()
    command = ["--only", "shared-memory"]
    shown = subprocess.run(
        [*shm("size=64m"), sys.executable, "-m", "blendhub.cli", "doctor", *command],
        stdout=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "60"},
        timeout=250,
    )
    text = os.read(ours, 2**16).decode()
    os.close(ours)
    os.close(theirs)
    assert shown.returncode == 3 and "\x1b[" in text and "warn" in text and "mend: " in text
    assert "mount -o remount,size=" in text.replace("\r\n", "")
