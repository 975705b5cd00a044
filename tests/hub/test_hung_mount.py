"""A hub whose shared directory hangs: its engines wait for nothing, and it stops when it is asked to."""

import subprocess
import sys
import time

import pytest

from blendhub.client.hub_client import HubClient
from harness.servers import mount
from harness.servers.redis_server import RedisServer, needs_redis
from tests.hub.fleet_direct import Fleet, store
from tests.hub.hub_direct import CHUNK, namespace, tokens

pytestmark = [
    pytest.mark.slow,
    needs_redis,
    pytest.mark.skipif(mount.BINARY is None, reason=mount.MISSING),
]
DEADLINE_S = 1.0
SERVE = [sys.executable, "-m", "blendhub.cli", "serve", "--arena-gib", "0.01"]


@pytest.fixture
def mounted(tmp_path):
    try:
        with mount.Mount(tmp_path / "behind", tmp_path / "place") as mounted:
            yield mounted
    except OSError as error:
        pytest.skip(f"{mount.MISSING}: {error}")


def test_sigterm_ends_a_hub_whose_loaders_hang(make_hub, mounted, tmp_path):
    texts = [tokens(seed, 2 * CHUNK) for seed in range(16)]
    with RedisServer() as server:
        fleet = Fleet(make_hub, server, mounted.place)
        writer = fleet.hub(n_slots=64)
        fleet.until(lambda: writer.follower.hubs == 1, "the hub has joined")
        member = writer.join()
        for text in texts:
            store(writer, member, text)
        options = {
            "path": mounted.place,
            "group": fleet.group,
            "catalogue": server.url,
            "transfer_deadline_s": DEADLINE_S,
        }
        given = [part for name, value in options.items() for part in ("--store-option", f"{name}={value}")]
        endpoint = f"ipc://{tmp_path}/hub.sock"
        hub = subprocess.Popen(
            [*SERVE, "--endpoint", endpoint, "--store", "shared_directory", *given],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert hub.stdout and any("--kv-transfer-config" in line for line in hub.stdout), "the hub did not start"
            client = HubClient(endpoint, timeout=10.0)
            client.register("engine", namespace())
            fleet.until(lambda: client.stats().gauges["chunks"] == 32, "the hub has read the catalogue")
            mounted.hang()
            began = time.monotonic()
            for text in texts:
                assert client.lookup(text, acquire=False).on_the_way_tokens == 2 * CHUNK
            assert time.monotonic() - began < 5 * DEADLINE_S, "lookups waited for the mount"
            began = time.monotonic()
            hub.terminate()
            assert hub.wait(30) == 0
            assert time.monotonic() - began < 4 * DEADLINE_S
            assert "stopped" in hub.stdout.read()
        finally:
            mounted.go_on()
            hub.kill()
            hub.wait()
