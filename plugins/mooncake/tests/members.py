"""Hubs of one fleet, each with a client that compares every byte it reads."""

import contextlib
import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from blendhub.client.hub_client import HubClient
from harness.servers.served_hub import ServedHub
from harness.servers.verifying_client import SMALL, read, write
from harness.waiting import wait_until

CHUNK = SMALL.layout.chunk_tokens
DOCUMENT = 8 * CHUNK
FOUND_S = 60.0
"""Far more than it takes, on a machine that is busy with other tests."""


class Member:
    """A hub and a client of it."""

    def __init__(self, hub: ServedHub, client: HubClient) -> None:
        self.hub, self.client = hub, client

    def store(self, *documents: int) -> None:
        counted: Counter[str] = Counter()
        chance = random.Random(1)
        while not counted["tokens stored"]:  # a write in ten is given up
            write(self.client, prompt(*documents), chance, counted)

    def tokens_of(self, *documents: int) -> int:
        """How many tokens of a prompt it reads; all of their bytes are compared with what they are to be."""
        counted: Counter[str] = Counter()
        self.client.lookup(prompt(*documents), acquire=False, wait_s=5.0)
        read(self.client, prompt(*documents), counted)
        assert not counted["WRONG TOKENS"]
        return counted["tokens read"]

    def find(self, *documents: int) -> None:
        """Wait until it reads all chunks of a prompt."""
        whole = len(prompt(*documents)) // CHUNK * CHUNK
        wait_until(lambda: self.tokens_of(*documents) >= whole, FOUND_S)

    def kill_what_moves_bytes(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child_of(self.hub), signal.SIGKILL)

    def count(self, name: str) -> float:
        return self.client.stats().counters[name]


def child_of(hub: ServedHub) -> int:
    """The process that calls Mooncake for a hub."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == hub.process.pid and b"blendhub_mooncake.child" in (process / "cmdline").read_bytes():
                return int(process.name)
    raise ProcessLookupError(f"the hub {hub.name} has no process of Mooncake now")


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """The process stands still in the block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):  # what does not answer is killed
            os.kill(pid, signal.SIGCONT)


def prompt(*documents: int) -> "np.ndarray[tuple[int], np.dtype[np.uint32]]":
    return np.concatenate([np.random.default_rng(n).integers(0, 2**31, DOCUMENT, np.uint32) for n in documents])
