"""A hub that ``blendhub serve`` runs, as a member of a fleet."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from blendhub.client.hub_client import HubClient
from blendhub.core.layout import Namespace
from harness.servers.mooncake_cluster import wait_until
from harness.servers.network import THIS, Machine

START_S = 120.0


class ServedHub:
    """Stops when it is closed."""

    def __init__(
        self, folder: Path, name: str, arena_gib: float, options: Mapping[str, str], machine: Machine = THIS
    ) -> None:
        """``options`` are the store's."""
        self.name = name
        self.endpoint = f"ipc://{folder}/{name}.sock"
        given = [
            part
            for key, value in {"address": machine.address, **options}.items()
            for part in ("--store-option", f"{key}={value}")
        ]
        flags = ["--endpoint", self.endpoint, "--arena-gib", str(arena_gib), "--store", "mooncake", *given]
        run = "import sys; from blendhub.cli import main; sys.exit(main(sys.argv[1:]))"
        command = machine.command(sys.executable, "-c", run, "serve", "--config", os.devnull, *flags)
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def client(self, namespace: Namespace) -> HubClient:
        """A client that is registered, and works once the hub is up."""
        client = HubClient(self.endpoint)

        def register() -> None:
            client.register(f"engine of {self.name}", namespace, rank=0)

        wait_until(register, START_S)
        return client

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def has_followed(one: HubClient, other: HubClient) -> bool:
    """Whether all that the one hub has is in the place, and known to the other."""
    here, there = one.stats().gauges, other.stats().gauges
    return not here["store_waiting_chunks"] and 0 < here["chunks"] == there["chunks"]
