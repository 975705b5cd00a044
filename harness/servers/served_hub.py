"""Hubs that ``blendhub serve`` runs, as members of a fleet."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from blendhub.client.hub_client import HubClient
from blendhub.client.wire import HubStats
from blendhub.core.layout import Namespace
from harness.waiting import wait_until

START_S = 120.0


class ServedHub:
    """Stops when it is closed."""

    def __init__(self, folder: Path, name: str, arena_gib: float, options: Mapping[str, str]) -> None:
        """``options`` are the store's."""
        self.name = name
        self.endpoint = f"ipc://{folder}/{name}.sock"
        flags = ["--endpoint", self.endpoint, "--arena-gib", str(arena_gib), "--store", "mooncake"]
        for key, value in options.items():
            flags += ["--store-option", f"{key}={value}"]
        run = "import sys; from blendhub.cli import main; sys.exit(main(sys.argv[1:]))"
        command = [sys.executable, "-c", run, "serve", "--config", os.devnull, *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def client(self, namespace: Namespace) -> HubClient:
        """A client that is registered, and works once the hub is up."""
        client = HubClient(self.endpoint)
        wait_until(lambda: client.register(f"engine of {self.name}", namespace, rank=0), START_S)
        return client

    def stats(self) -> HubStats:
        with HubClient(self.endpoint) as client:
            return client.stats().result()

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
