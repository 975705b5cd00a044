"""Hubs of one fleet, each with a client that compares every byte it reads."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from blendhub.client.hub_client import HubClient
from blendhub.core.errors import LeaseError
from blendhub.core.layout import KVLayout, Namespace
from blendhub.core.spans import Span
from harness.servers.served_hub import ServedHub
from harness.waiting import wait_until

SMALL = Namespace(
    model="soak",
    layout=KVLayout(layers=2, kv_heads=1, key_dim=32, value_dim=32, dtype="float32", chunk_tokens=64),
)
ROW = np.arange(1, 33, dtype=np.uint32) * np.uint32(2654435761)
Words = npt.NDArray[np.uint32]
CHUNK = SMALL.layout.chunk_tokens
DOCUMENT = 8 * CHUNK
FOUND_S = 60.0
"""Far more than it takes, on a machine that is busy with other tests."""


class Member:
    """A hub and a client of it. Bytes follow from their tokens, so that every byte that is read is checked."""

    def __init__(self, hub: ServedHub, client: HubClient) -> None:
        self.hub, self.client = hub, client

    def store(self, *documents: int, fate: str = "commit") -> None:
        """``fate``: what becomes of the write: "commit", "abort", or "leave" after the first chunk."""
        tokens = prompt(*documents)
        reserved = self.client.reserve(tokens, Span(0, len(tokens)))
        if reserved.right is None:
            return
        for slot in reserved.slots:
            with self.client.writing(reserved.right):
                self._rows(slot.slot)[:, : len(slot.span)] = content(tokens, slot.span)
            if fate == "leave":
                return
        if fate == "abort":
            self.client.abort(reserved.right)
        else:
            self.client.commit(reserved.right, reserved.span.end)

    def tokens_of(self, *documents: int) -> int:
        """How many tokens of a prompt it reads; their bytes are compared once the lease has proven itself."""
        tokens, copies = prompt(*documents), []
        self.client.lookup(tokens, acquire=False, wait_s=5.0).result()
        try:
            with self.client.reading(self.client.lookup(tokens).result()) as pieces:
                for piece in pieces:
                    rows = self._rows(piece.shard)[:, piece.row : piece.row + len(piece.span)].copy()
                    copies.append((piece.span, rows))
        except LeaseError:
            return 0
        assert all((rows == content(tokens, span)).all() for span, rows in copies)
        return sum(len(span) for span, _ in copies)

    def _rows(self, slot: int) -> Words:
        """A slot as [part, token, word]: keys and values of each layer."""
        layout = SMALL.layout
        rows: Words = self.client.shard(slot).view(np.uint32).reshape(2 * layout.layers, layout.chunk_tokens, len(ROW))
        return rows

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


def prompt(*documents: int) -> Words:
    return np.concatenate([np.random.default_rng(n).integers(0, 2**31, DOCUMENT, np.uint32) for n in documents])


def content(tokens: Words, span: Span) -> Words:
    """The bytes that these tokens' rows must hold, different in every part."""
    parts = np.arange(2 * SMALL.layout.layers, dtype=np.uint32)[:, None, None]
    rows: Words = (tokens[span.start : span.end, None] * ROW)[None] ^ parts
    return rows
