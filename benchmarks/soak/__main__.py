"""A hub among clients that are good, hostile, killed and frozen.

First a good client works alone, then beside a hostile one; then clients are killed and frozen, and the hub is frozen
and restarted. Every byte that is read is held against what was written. Ends with exit code 1 if one was wrong, if
anything stayed leased, in quarantine or open, if an answer had no type, if the hub's memory grew, or if the hostile
client slowed the good one down.
"""

import argparse
import contextlib
import multiprocessing
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from benchmarks.soak.clients import Report, work
from benchmarks.soak.hub import HubProcess
from benchmarks.soak.intruder import intrude
from blendhub.client.hub_client import HubClient
from harness.servers.verifying_client import LARGE, SMALL

SETTLE_S = 30.0
QUIET_S = 10.0
ROUNDS = 50
EARLY, LATE = slice(2, 7), slice(45, 50)
"""The rounds whose memory is compared, by their medians: the hub may hold a message of megabytes when it is read."""
MOST_SLOWDOWN, MOST_GROWTH = 5.0, 1.05
FROZEN_S = 3.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of clients that are killed and frozen")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--messages", type=int, default=200_000, help="of the hostile client")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Progress(console=Console(stderr=True)) as progress:
        return Soak(HubProcess(Path(folder)), progress).run(options.seconds, options.clients, options.messages)


class Soak:
    """The hub's process, the clients' processes, and what they report."""

    def __init__(self, hub: HubProcess, progress: Progress) -> None:
        self._processes = multiprocessing.get_context("spawn")
        self._hub = hub
        self._progress = progress
        self._clients: list[Any] = []
        self._reports: list[Connection] = []
        self.total: Counter[str] = Counter()
        self._seconds: list[float] = []

    def run(self, seconds: float, n_clients: int, n_messages: int) -> int:
        self._add("good", SMALL.layout.chunk_tokens)
        self._wait(2 * QUIET_S, "a good client alone")
        self._seconds.clear()
        self._wait(QUIET_S, "a good client alone, measured")
        quiet = _p99(self._seconds)
        self._seconds.clear()
        memory = self._intrude(n_messages)
        beside_hostile = _p99(self._seconds)
        for number in range(1, n_clients):
            self._add(f"client {number}", (SMALL, LARGE)[number % 2].layout.chunk_tokens)
        self._trouble(seconds)
        self._end_clients()
        leaked = self._leaks()
        self._hub.stop()
        self.total["THE HUB FAILED"] = self._hub.failures
        return _report(self.total, leaked, quiet, beside_hostile, memory)

    def _intrude(self, n_messages: int) -> tuple[float, float]:
        """Rounds of a hostile client's messages; returns the hub's memory in the first and in the last of them."""
        orders, theirs = self._processes.Pipe()
        hostile = self._processes.Process(target=intrude, args=(self._hub.endpoint, 1, theirs), daemon=True)
        hostile.start()
        theirs.close()
        sizes = []
        for _ in self._progress.track(range(ROUNDS), description="beside a hostile client"):
            orders.send(n_messages // ROUNDS)
            while not orders.poll(0.05):
                self._collect()
            self.total.update(orders.recv())
            sizes.append(self._hub.own_bytes())
        orders.close()
        hostile.join(30)
        return statistics.median(sizes[EARLY]), statistics.median(sizes[LATE])

    def _trouble(self, seconds: float) -> None:
        """Kill and freeze clients, freeze and restart the hub."""
        until = time.monotonic() + seconds
        actions = [self._kill_one, self._freeze_one, self._kill_one, self._freeze_hub, self._restart_hub]
        turn = 0
        while time.monotonic() < until:
            self._wait(min(3.0, seconds / 10), "clients that are killed and frozen")
            actions[turn % len(actions)]()
            turn += 1

    def _add(self, name: str, chunk_tokens: int) -> None:
        client, reports = self._start(name, chunk_tokens)
        self._clients.append(client)
        self._reports.append(reports)

    def _start(self, name: str, chunk_tokens: int) -> tuple[Any, Connection]:
        # A pipe for each: who is killed while it writes to a queue keeps that queue's lock for ever.
        reports, theirs = self._processes.Pipe(duplex=False)
        arguments = (self._hub.endpoint, f"{name} {time.time_ns()}", chunk_tokens, theirs)
        client = self._processes.Process(target=work, args=arguments, daemon=True, name=f"{name}/{chunk_tokens}")
        client.start()
        theirs.close()
        return client, reports

    def _wait(self, seconds: float, what: str) -> None:
        task = self._progress.add_task(what, total=seconds)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(0.1)
            self._collect()
            self._progress.update(task, completed=seconds - max(0.0, until - time.monotonic()))
        self._progress.remove_task(task)

    def _kill_one(self) -> None:
        number = random.randrange(len(self._clients))
        killed = self._clients[number]
        self.total["CLIENTS THAT FAILED"] += not killed.is_alive()
        os.kill(killed.pid, signal.SIGKILL)
        killed.join()
        self._collect()
        name, _, chunk_tokens = killed.name.partition("/")
        self._clients[number], self._reports[number] = self._start(name, int(chunk_tokens))
        self.total["clients killed"] += 1

    def _freeze_one(self) -> None:
        """Freeze a client for longer than its leases last."""
        client = random.choice(self._clients)
        os.kill(client.pid, signal.SIGSTOP)
        self._wait(FROZEN_S, "a client is frozen")
        os.kill(client.pid, signal.SIGCONT)
        self.total["clients frozen"] += 1

    def _freeze_hub(self) -> None:
        self._hub.signal(signal.SIGSTOP)
        self._wait(FROZEN_S, "the hub is frozen")
        self._hub.signal(signal.SIGCONT)
        self.total["freezes of the hub"] += 1

    def _restart_hub(self) -> None:
        self._count_tiers()
        self._hub.restart()
        self.total["restarts of the hub"] += 1

    def _count_tiers(self) -> None:
        with HubClient(self._hub.endpoint) as client:
            counters = client.stats().counters
        self.total["chunks evicted"] += int(counters["evictions"])
        self.total["chunks read back from disk"] += int(counters["store_loads"])

    def _collect(self) -> None:
        for reports in self._reports:
            with contextlib.suppress(EOFError, OSError):  # its client was killed, perhaps in mid-sentence
                while reports.poll():
                    report: Report = reports.recv()
                    counted, seconds = report
                    self.total.update(counted)
                    if seconds is not None:
                        self._seconds.append(seconds)

    def _end_clients(self) -> None:
        for client in self._clients:
            client.terminate()
        for client in self._clients:
            client.join(30)
            # One that has just been started may not know yet what to do when it is terminated.
            self.total["CLIENTS THAT FAILED"] += client.exitcode not in (0, -signal.SIGTERM)
        self._collect()
        self._count_tiers()

    def _leaks(self) -> str:
        """What is still held when no client is left; empty if nothing is."""
        with HubClient(self._hub.endpoint) as client:
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


def _p99(seconds: list[float]) -> float:
    return sorted(seconds)[len(seconds) * 99 // 100] if seconds else float("inf")


def _report(total: Counter[str], leaked: str, quiet: float, beside_hostile: float, memory: tuple[float, float]) -> int:
    for name, count in sorted(total.items()):
        print(f"{name:40} {count:>16,}")
    slowdown, growth = beside_hostile / quiet, memory[1] / memory[0]
    print(f"{'p99 of a good lookup alone':40} {quiet * 1000:>13.2f} ms")
    print(f"{'p99 of a good lookup beside a hostile one':40} {beside_hostile * 1000:>13.2f} ms, {slowdown:.1f} times")
    print(f"{'memory of the hub, about round 5':40} {memory[0] / 1e6:>13.1f} MB")
    print(f"{'memory of the hub, about round 48':40} {memory[1] / 1e6:>13.1f} MB, {growth:.3f} times")
    print(f"{'leased, in quarantine or open':40} {leaked or 'nothing':>16}")
    worked = ("tokens read", "chunks evicted", "chunks read back from disk", "hostile: answered")
    wrong = ("WRONG TOKENS", "CLIENTS THAT FAILED", "ERRORS WITHOUT A TYPE", "THE HUB FAILED")
    faults = [f"no {name}" for name in worked if not total[name]] + [name for name in wrong if total[name]]
    faults += [f"leaked: {leaked}"] if leaked else []
    faults += [f"slowed down {slowdown:.1f} times"] if slowdown > MOST_SLOWDOWN else []
    faults += [f"memory grew {growth:.3f} times"] if growth > MOST_GROWTH else []
    print(
        f"FAILED: {'; '.join(faults)}" if faults else "every byte was right, and the good client noticed no hostile one"
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
