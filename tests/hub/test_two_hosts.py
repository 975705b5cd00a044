"""A hub on another machine: two network namespaces, and a cable between them that can be pulled."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from blendhub.cli import main
from harness.namespaces import network_or_skip, skip_unless_permitted
from harness.servers.network import Machine, Network

pytestmark = [pytest.mark.alone, pytest.mark.slow]

TIMEOUT_S = 4.0
AGAIN_S = 20.0
# Memory and processes of its own too, as on another machine: nothing of the hub's can be mapped.
ELSEWHERE = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c"]
WITH_MEMORY_OF_ITS_OWN = 'mount -t tmpfs tmpfs /dev/shm && exec "$0" "$@"'

CLIENT = """
import json, sys, time
import numpy as np
from blendhub.client.hub_client import HubClient
from blendhub.core.errors import BlendHubError
from blendhub.core.layout import KVLayout, Namespace
from blendhub.core.spans import Span

LAYOUT = KVLayout(layers=16, kv_heads=8, key_dim=64, value_dim=64, dtype="float16", chunk_tokens=256)
TOKENS = 12 * 256

def text(seed):
    return np.random.default_rng(seed).integers(0, 2**17, TOKENS, dtype=np.uint32)

def shard(seed, position):
    return np.random.default_rng([seed, position]).integers(0, 256, LAYOUT.shard_bytes, dtype=np.uint8)

def store(seed):
    reserved = client.reserve(text(seed), Span(0, TOKENS))
    for slot in reserved.slots:
        client.put(reserved.right, slot.span.start, shard(seed, slot.span.start).data)
    client.commit(reserved.right, TOKENS)
    return len(reserved.slots)

def read(seed):
    found = client.lookup(text(seed))
    with client.reading(found) as pieces:
        parts = client.submit_fetch(found.lease, [piece.shard for piece in pieces]).payload()
    assert len(parts) == len(pieces)
    for piece, part in zip(pieces, parts):
        assert bytes(part) == shard(seed, piece.source_start).tobytes(), "other bytes than were stored"
    return len(parts)

endpoint, options, timeout = json.loads(sys.argv[1])
client = HubClient(endpoint, options=options, timeout=timeout)
client.register("far", Namespace(model="far", layout=LAYOUT), rank=0)
print(json.dumps("mapped" if client.arena else "not mapped"), flush=True)
for line in sys.stdin:
    work, seed = json.loads(line)
    begun = time.monotonic()
    try:
        outcome = {"store": store, "read": read}[work](seed)
    except BlendHubError as error:
        outcome = type(error).__name__
    print(json.dumps([outcome, time.monotonic() - begun]), flush=True)
"""


class Hosts:
    """Two machines on a network."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.hub, self.engine = network.add(), network.add()
        self.endpoint = f"tcp://{self.hub.address}:7070"

    @staticmethod
    def start(host: Machine, *command: str) -> subprocess.Popen:
        return subprocess.Popen(host.command(*command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with network_or_skip() as network:
        skip_unless_permitted([*ELSEWHERE, WITH_MEMORY_OF_ITS_OWN])
        yield Hosts(network)


class FarEngine:
    """An engine's client, on its own host."""

    def __init__(self, hosts: Hosts, options: dict[str, Any]) -> None:
        arguments = json.dumps([hosts.endpoint, options, TIMEOUT_S])
        self.process = hosts.start(
            hosts.engine, *ELSEWHERE, WITH_MEMORY_OF_ITS_OWN, sys.executable, "-c", CLIENT, arguments
        )

    def hear(self) -> Any:
        assert self.process.stdout
        return json.loads(self.process.stdout.readline())

    def begin(self, work: str, seed: int) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps([work, seed]) + "\n")
        self.process.stdin.flush()

    def do(self, work: str, seed: int) -> int | str:
        """How many chunks, or the name of the error; by the deadline either way."""
        self.begin(work, seed)
        return self.outcome()

    def outcome(self) -> int | str:
        outcome, seconds = self.hear()
        # A transfer takes more than one request; only one of them can fail.
        assert isinstance(outcome, int) or seconds < 2 * TIMEOUT_S
        return outcome


@pytest.fixture
def far_engine(hosts: Hosts, tmp_path: Path) -> Iterator[FarEngine]:
    keys = tmp_path / "keys"
    assert main(["keys", str(keys)]) == 0
    (tmp_path / "hub.toml").write_text(
        f"""
        arena_gib = 0.3
        metrics = ""
        [[listen]]
        endpoint = "{hosts.endpoint}"
        options = {{secret_key = "{keys}/server.secret", client_keys = "{keys}/clients", heartbeat_s = 0.3}}
        """
    )
    hub = hosts.start(hosts.hub, sys.executable, "-m", "blendhub.cli", "serve", "--config", f"{tmp_path}/hub.toml")
    assert hub.stdout
    assert any("--kv-transfer-config" in line for line in hub.stdout), "the hub did not start"
    options = {"secret_key": f"{keys}/client.secret", "server_key": f"{keys}/server.public", "heartbeat_s": 0.3}
    engine = FarEngine(hosts, options)
    yield engine
    for process in (engine.process, hub):
        process.terminate()
        process.communicate(timeout=20)


def test_kv_travels_between_hosts_and_survives_a_cable_that_is_pulled_in_mid_call(hosts, far_engine):
    assert far_engine.hear() == "not mapped"
    assert far_engine.do("store", 1) == 12
    assert far_engine.do("read", 1) == 12
    far_engine.begin("read", 1)
    time.sleep(0.05)
    hosts.network.unplug(hosts.hub)
    assert far_engine.outcome() in ("DeadlineExceeded", "PeerGone")
    assert far_engine.do("read", 1) in ("DeadlineExceeded", "PeerGone")
    hosts.network.plug(hosts.hub)
    until = time.monotonic() + AGAIN_S
    while (outcome := far_engine.do("read", 1)) != 12:
        assert isinstance(outcome, str), "what was stored before is not all there"
        assert time.monotonic() < until, "the engine did not find the hub again"
        time.sleep(0.1)
    assert far_engine.do("store", 2) == 12
    assert far_engine.do("read", 2) == 12
