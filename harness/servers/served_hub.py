"""Hubs that ``blendhub serve`` runs, as members of a fleet."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from blendhub.client.hub_client import HubClient
from blendhub.client.wire import HubStats
from blendhub.core.layout import Namespace
from harness.servers.mooncake_cluster import Cluster
from harness.servers.network import THIS, Machine
from harness.servers.redis_server import RedisServer
from harness.waiting import wait_until

START_S, FOLLOWED_S = 120.0, 60.0


class ServedHub:
    """Stops when it is closed."""

    def __init__(
        self, folder: Path, name: str, arena_gib: float, options: Mapping[str, str], machine: Machine = THIS
    ) -> None:
        """``options`` are the store's."""
        self.name = name
        self.endpoint = f"ipc://{folder}/{name}.sock"
        flags = ["--endpoint", self.endpoint, "--arena-gib", str(arena_gib), "--store", "mooncake"]
        for key, value in {"address": machine.address, **options}.items():
            flags += ["--store-option", f"{key}={value}"]
        run = "import sys; from blendhub.cli import main; sys.exit(main(sys.argv[1:]))"
        command = machine.command(sys.executable, "-c", run, "serve", "--config", os.devnull, *flags)
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def client(self, namespace: Namespace) -> HubClient:
        """A client that is registered, and works once the hub is up."""
        client = HubClient(self.endpoint)
        wait_until(lambda: client.register(f"engine of {self.name}", namespace, rank=0), START_S)
        return client

    def stats(self) -> HubStats:
        with HubClient(self.endpoint) as client:
            return client.stats()

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextlib.contextmanager
def two_hubs(
    folder: Path, arenas_gib: Sequence[float], machines: Sequence[Machine] = (THIS,) * 3
) -> Iterator[list[ServedHub]]:
    """The hubs of two machines, whose fleet has Redis and Mooncake on a third."""
    *members, servers = machines
    with contextlib.ExitStack() as closing:
        cluster = closing.enter_context(Cluster(servers))
        cluster.start_master()
        cluster.start_node(2**31)
        redis = closing.enter_context(RedisServer(machine=servers))
        # Engines, hubs and servers share the cores of one machine.
        patient = {"deadline_s": "20", "transfer_deadline_s": "20"}
        fleet = {"master": cluster.address, "catalogue": redis.url, **patient}
        hubs = [
            closing.enter_context(contextlib.closing(ServedHub(folder, f"hub-{number}", arena_gib, fleet, machine)))
            for number, (machine, arena_gib) in enumerate(zip(members, arenas_gib, strict=True))
        ]
        for hub in hubs:
            wait_until(hub.stats, START_S)
        yield hubs


def wait_until_followed(writer: ServedHub, reader: ServedHub) -> None:
    """Wait until all that the one hub has is in the fleet, and known to the other."""

    def has_followed() -> bool:
        here, there = writer.stats().gauges, reader.stats().gauges
        return not here["store_waiting_chunks"] and 0 < here["chunks"] == there["chunks"]

    wait_until(has_followed, FOLLOWED_S)
