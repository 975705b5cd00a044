"""Hubs of a fleet for benchmarks: each in a process, with a place of bytes in shared memory."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.memory import own_bytes
from blendhub.core.layout import DEFAULT_MATCHERS, KVLayout, Namespace
from blendhub.core.spans import Span
from blendhub.hub.config import HubConfig, StoreChoice
from blendhub.hub.embedded import HubInProcess
from harness.servers.redis_server import RedisServer

CHUNK = 256
LAYOUT = KVLayout(layers=1, kv_heads=1, key_dim=1, value_dim=1, dtype="int8", chunk_tokens=CHUNK)
NAMESPACE = Namespace(model="a model", layout=LAYOUT, matchers=DEFAULT_MATCHERS)
VOCABULARY = 150_000
HUBS, EACH = 1000, 100
"""The number of hubs of a fleet on paper, and of the chunks that each hub stores in a second."""


def text(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCABULARY, length, dtype=np.uint32)


class BenchedHub:
    """A hub, a client of it, and what its process takes."""

    def __init__(self, hub: HubInProcess, name: str) -> None:
        self._pid = hub._child._process.pid
        self.client = hub.connect()
        self.client.register(name, NAMESPACE, rank=0)

    def store(self, tokens: np.ndarray) -> None:
        reserved = self.client.reserve(tokens, Span(0, len(tokens)))
        if reserved.right is not None:
            self.client.commit(reserved.right, reserved.span.end)

    def knows(self, tokens: np.ndarray) -> bool:
        """Whether a lookup finds all of it, here or elsewhere."""
        found = self.client.lookup(tokens, acquire=False)
        return sum(len(match.span) for match in found.matches) + found.on_the_way_tokens == len(tokens)

    def count(self, name: str) -> float:
        return self.client.stats().counters[name]

    def gauge(self, name: str) -> float:
        return self.client.stats().gauges[name]

    def cpu_seconds(self) -> float:
        """The CPU seconds of all threads of the process since its start."""
        fields = Path(f"/proc/{self._pid}/stat").read_text().rpartition(") ")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def own_bytes(self) -> int:
        """Its memory without the arena, which is shared."""
        return own_bytes(self._pid)


@contextlib.contextmanager
def running_hub(server: RedisServer, place: Path, group: str, arena_gib: float = 0.1) -> Iterator[BenchedHub]:
    options = {"catalogue": server.url, "path": str(place), "group": group, "deadline_s": 10.0}
    config = HubConfig(arena_gib=arena_gib, store=StoreChoice("shared_directory", options), metrics="")
    with HubInProcess(config) as hub:
        benched = BenchedHub(hub, group)
        try:
            yield benched
        finally:
            benched.client.close()
