"""Eight clients, one hub, a small arena and a small disk: every byte that is read is held against what was written.

Clients store and look up prompts made of shared documents, leave writes unfinished, and are killed now and then.
Ends with exit code 1 if a single byte was wrong, if anything leaked, if a client failed, or if eviction or the disk
had nothing to do.
"""

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import Progress

from blendhub.client import HubClient
from blendhub.config import HubConfig, Listen, StoreChoice
from blendhub.errors import BlendHubError, LeaseError
from blendhub.hub.hub import Hub
from blendhub.layout import KVLayout, Namespace
from blendhub.plan import Span

LAYOUT = KVLayout(layers=2, kv_heads=1, key_dim=32, value_dim=32, dtype="float32", chunk_tokens=64)
SPACE = Namespace(model="soak", layout=LAYOUT)
DOCUMENTS = 150
ROW = np.arange(1, 33, dtype=np.uint32) * np.uint32(2654435761)
SETTLE_S = 30.0

Array = npt.NDArray[np.uint32]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=8)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return Soak(Path(folder), options.clients).run(options.seconds)


class Soak:
    """The hub's process, the clients' processes, and what they report."""

    def __init__(self, folder: Path, n_clients: int) -> None:
        self._processes = multiprocessing.get_context("spawn")
        self._endpoint = f"ipc://{folder}/hub.sock"
        ready = self._processes.Event()
        self._hub = self._processes.Process(target=serve, args=(self._endpoint, str(folder / "store"), ready))
        self._hub.start()
        if not ready.wait(60):
            raise SystemExit("the hub did not start")
        self._clients: list[Any] = []
        self._reports: list[Connection] = []
        for number in range(n_clients):
            client, reports = self._start(number)
            self._clients.append(client)
            self._reports.append(reports)

    def run(self, seconds: float) -> int:
        total: Counter[str] = Counter()
        until = time.monotonic() + seconds
        with Progress(console=Console(stderr=True)) as progress:
            task = progress.add_task("soak", total=seconds)
            next_kill = time.monotonic() + 5
            while time.monotonic() < until:
                time.sleep(0.2)
                self._collect(total)
                if time.monotonic() > next_kill:
                    self._kill_one(total)
                    next_kill = time.monotonic() + 3
                progress.update(task, completed=seconds - max(0.0, until - time.monotonic()))
        for client in self._clients:
            client.terminate()
        for client in self._clients:
            client.join(30)
            # One that has just been started may not know yet what to do when it is terminated.
            total["CLIENTS THAT FAILED"] += client.exitcode not in (0, -signal.SIGTERM)
        self._collect(total)
        total["chunks evicted"], total["chunks read back from disk"] = self._tiers()
        leaked = self._leaks()
        self._hub.terminate()
        self._hub.join(30)
        return _report(total, leaked)

    def _start(self, number: int) -> tuple[Any, Connection]:
        # A pipe for each: who is killed while it writes to a queue keeps that queue's lock for ever.
        reports, theirs = self._processes.Pipe(duplex=False)
        client = self._processes.Process(target=work, args=(self._endpoint, number, theirs), daemon=True)
        client.start()
        theirs.close()
        return client, reports

    def _kill_one(self, total: Counter[str]) -> None:
        number = random.randrange(len(self._clients))
        total["CLIENTS THAT FAILED"] += not self._clients[number].is_alive()
        os.kill(self._clients[number].pid, signal.SIGKILL)
        self._clients[number].join()
        self._collect(total)
        self._clients[number], self._reports[number] = self._start(number)
        total["clients killed"] += 1

    def _collect(self, total: Counter[str]) -> None:
        for reports in self._reports:
            with contextlib.suppress(EOFError, OSError):  # its client was killed, perhaps in mid-sentence
                while reports.poll():
                    total.update(reports.recv())

    def _tiers(self) -> tuple[int, int]:
        with HubClient(self._endpoint) as client:
            counters = client.stats().counters
        return int(counters["evictions"]), int(counters["store_loads"])

    def _leaks(self) -> str:
        """What is still held when no client is left; empty if nothing is."""
        with HubClient(self._endpoint) as client:
            until = time.monotonic() + SETTLE_S
            while True:
                gauges = client.stats().gauges
                held = {
                    name: gauges[name]
                    for name in ("sessions", "read_leases", "write_leases", "arena_quarantined_bytes")
                    if gauges[name]
                }
                if not held or time.monotonic() > until:
                    return ", ".join(f"{name} = {value:.0f}" for name, value in held.items())
                time.sleep(0.2)


def serve(endpoint: str, store: str, ready: Any) -> None:
    """A hub that is always short of memory and of disk; it checks its own integrity all the time."""
    config = HubConfig(
        arena_gib=600 * SPACE.slot_bytes / 2**30,
        listen=(Listen(endpoint=endpoint),),
        store=StoreChoice(options={"path": store, "capacity_gib": 900 * SPACE.slot_bytes / 2**30}),
        policy="s3fifo",
        write_lease_s=2.0,
        silence_s=5.0,
        metrics="",
    )

    async def run() -> None:
        stopped = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
        async with Hub(config) as hub:
            ready.set()
            while not stopped.is_set():
                hub.service.state.check_integrity()
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(stopped.wait(), 1.0)

    asyncio.run(run())


def work(endpoint: str, number: int, reports: Connection) -> None:
    """One client, until it is terminated or killed."""
    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
    chance = random.Random(f"{number} {time.time_ns()}")
    documents = [
        np.random.default_rng(seed).integers(0, 2**31, 200 + 7 * seed, dtype=np.uint32) for seed in range(DOCUMENTS)
    ]
    with HubClient(endpoint) as client:
        client.register(f"engine-{number}-{os.getpid()}", SPACE, rank=0)
        while not stopped:
            prompt = np.concatenate([documents[chance.randrange(DOCUMENTS)] for _ in range(3)])
            counted: Counter[str] = Counter()
            try:
                read(client, prompt, counted)
                write(client, prompt, chance, counted)
            except BlendHubError as error:
                counted[f"told: {type(error).__name__}"] += 1
            reports.send(counted)


def read(client: HubClient, prompt: Array, counted: Counter[str]) -> None:
    """Look the prompt up, copy what is found, and compare every byte once the lease has proven itself."""
    found = client.lookup(prompt, acquire=False, wait_s=0.2)
    counted["lookups"] += 1
    copies: list[tuple[Span, Array]] = []
    try:
        with client.reading(client.acquire(found.matches)) as pieces:
            for piece in pieces:
                rows = _rows(client, piece.slot)
                copies.append((piece.span, rows[:, piece.slot_token : piece.slot_token + len(piece.span)].copy()))
    except LeaseError:
        counted["leases that ran out"] += 1
        return
    for span, rows in copies:
        counted["tokens read"] += len(span)
        counted["bytes verified"] += rows.nbytes
        counted["WRONG TOKENS"] += int((rows != _content(prompt, span)).any(axis=(0, 2)).sum())


def write(client: HubClient, prompt: Array, chance: random.Random, counted: Counter[str]) -> None:
    """Store the prompt; now and then leave it unfinished or take it back."""
    reserved = client.reserve(prompt, Span(0, len(prompt)))
    if reserved.right is None:
        return
    fate = chance.random()
    for slot in reserved.slots:
        with client.writing(reserved.right):
            _rows(client, slot.slot)[:, : len(slot.span)] = _content(prompt, slot.span)
        if fate < 0.05:
            counted["writes left unfinished"] += 1
            return
    if fate < 0.1:
        client.abort(reserved.right)
        counted["writes aborted"] += 1
        return
    client.commit(reserved.right, reserved.span.end)
    counted["tokens stored"] += len(reserved.span)


def _rows(client: HubClient, slot: int) -> Array:
    """A slot as [part, token, word]: keys and values of each layer."""
    rows: Array = client.shard(slot).view(np.uint32).reshape(2 * LAYOUT.layers, LAYOUT.chunk_tokens, len(ROW))
    return rows


def _content(prompt: Array, span: Span) -> Array:
    """What must be in the rows of these tokens, in every part something else."""
    parts = np.arange(2 * LAYOUT.layers, dtype=np.uint32)[:, None, None]
    content: Array = (prompt[span.start : span.end, None] * ROW)[None] ^ parts
    return content


def _report(total: Counter[str], leaked: str) -> int:
    for name, count in sorted(total.items()):
        print(f"{name:28} {count:>16,}")
    wrong = total["WRONG TOKENS"]
    print(f"{'leaked':28} {leaked or 'nothing':>16}")
    busy = all(total[name] for name in ("tokens read", "chunks evicted", "chunks read back from disk"))
    good = busy and not wrong and not leaked and not total["CLIENTS THAT FAILED"]
    print("every byte was right" if good else "FAILED")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
