"""Hubs that follow each other: how soon one finds what another stored, what following costs, how long joining takes.

The hubs have a place of bytes in shared memory.
"""

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from benchmarks.fleet.publisher import CHUNK, CHUNKS_A_RUN, NAMESPACE, Publisher, random_text
from benchmarks.memory import own_bytes
from benchmarks.report import Row, row
from benchmarks.timing import progress, seconds
from blendhub.core.spans import Span
from blendhub.hub.config import HubConfig, StoreChoice
from blendhub.hub.embedded import HubInProcess
from harness.servers.redis_server import RedisServer

HUBS, EACH = 1000, 100
"""The number of hubs of a fleet on paper, and of the chunks that each hub stores in a second."""
FOUND_A_SECOND, PUBLISHED_A_SECOND = 50, 10_000
PROMPT = 32_768
PATIENCE_S = 60.0


class BenchedHub:
    """A hub, a client of it, and what its process takes."""

    def __init__(self, hub: HubInProcess, name: str) -> None:
        self._pid = hub._process.pid
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

    def published(self) -> float:
        """The chunks of other hubs that became matchable."""
        return self.client.stats().counters["fleet_published_chunks"]

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
def _hub(server: RedisServer, place: Path, group: str) -> Iterator[BenchedHub]:
    options = {"catalogue": server.url, "path": str(place), "group": group, "deadline_s": 10.0}
    config = HubConfig(arena_gib=0.1, store=StoreChoice("shared_directory", options), metrics="")
    with HubInProcess(config) as hub:
        benched = BenchedHub(hub, group)
        with contextlib.closing(benched.client):
            yield benched


def _wait(is_so: Callable[[], bool], what: str, patience_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + patience_s
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not happen within {patience_s:g} s")
        time.sleep(0.01)


def finding(server: RedisServer, place: Path, *, quick: bool) -> Iterator[Row]:
    """From the commit of a chunk on one hub to the first lookup on another that finds it."""
    n = FOUND_A_SECOND * (2 if quick else 30)
    with _hub(server, place, "found") as writer, _hub(server, place, "found") as finder:
        _wait(lambda: min(writer.gauge("fleet_hubs"), finder.gauge("fleet_hubs")) >= 2, "that two hubs see each other")
        _found_after(writer, finder, range(FOUND_A_SECOND))  # the first ones warm up
        taken = sorted(_found_after(writer, finder, range(FOUND_A_SECOND, FOUND_A_SECOND + n)))
    what = f"from commit on one hub to a match on the other, chunks of {CHUNK} tokens, {FOUND_A_SECOND} a second"
    yield row("found_elsewhere_ms", f"{what}; median", "ms", [1e3 * after for after in taken], 50, "lower")
    p99 = 1e3 * taken[len(taken) * 99 // 100]
    yield row("found_elsewhere_p99_ms", "the same, 99 of 100 are faster", "ms", [p99], 250, "lower")


def _found_after(writer: BenchedHub, finder: BenchedHub, seeds: range) -> list[float]:
    waiting: deque[tuple[float, np.ndarray]] = deque()

    def write() -> None:
        began = time.perf_counter()
        for place, seed in enumerate(seeds):
            time.sleep(max(0.0, began + place / FOUND_A_SECOND - time.perf_counter()))
            tokens, at = random_text(seed, CHUNK), time.perf_counter()
            writer.store(tokens)
            waiting.append((at, tokens))

    thread = threading.Thread(target=write)
    thread.start()
    taken: list[float] = []
    deadline = time.monotonic() + len(seeds) / FOUND_A_SECOND + PATIENCE_S
    while len(taken) < len(seeds):
        if waiting and finder.knows(waiting[0][1]):
            taken.append(time.perf_counter() - waiting.popleft()[0])
        elif time.monotonic() > deadline:
            raise TimeoutError(f"{len(seeds) - len(taken)} chunks of {len(seeds)} were not found")
        else:
            time.sleep(0.001)
    thread.join()
    return taken


def events(server: RedisServer, place: Path, *, quick: bool) -> Iterator[Row]:
    """Lookups beside changes of other hubs, and what a change costs.

    Another process publishes as fast in both cases: in the group that the hub follows, or in another one.
    """
    rounds, lasting = (2, 1.5) if quick else (7, 4.0)
    ratios, tails, costs, rates = [], [], [], []
    with _hub(server, place, "followed") as hub:
        pieces = [random_text(seed, 2048) for seed in range(16)]
        for piece in pieces[::2]:
            hub.store(piece)
        prompt = np.concatenate(pieces)
        _beside(hub, prompt, server, "followed", lasting)  # warms up
        for _ in progress(range(rounds), "lookups beside changes"):
            alone, _, idle_cpu, _ = _beside(hub, prompt, server, "another", lasting)
            beside, applied, cpu, took = _beside(hub, prompt, server, "followed", lasting)
            ratios.append(beside / alone)
            tails.append(1e3 * beside)
            costs.append(max(cpu - idle_cpu, 0.0) / applied)
            rates.append(applied / took)
    what = f"p99 of lookups of {PROMPT:,} tokens while {PUBLISHED_A_SECOND:,} chunks a second are published"
    yield row("lookup_beside_events", f"{what}, relative to none", "x", ratios, 2, "lower")
    yield row("lookup_beside_events_p99_ms", "the same in milliseconds", "ms", tails, better="lower")
    yield row("chunks_applied_per_s", "chunks of another hub that became matchable meanwhile", "1/s", rates)
    each = [1e6 * cost for cost in costs]
    yield row("chunk_event_us", "the hub's processor time for one of them", "us", each, better="lower")
    shares = [HUBS * EACH * cost for cost in costs]
    yield row("fleet_1000", f"on paper: {HUBS} x {EACH} a second x that time", "cores", shares, better="lower")


def _beside(
    hub: BenchedHub, prompt: np.ndarray, server: RedisServer, group: str, lasting: float
) -> tuple[float, float, float, float]:
    """The p99 of lookups, chunks applied, the hub's processor time, and how long all of it took."""
    before, cpu, began = hub.published(), hub.cpu_seconds(), time.perf_counter()
    arguments = [server.url, group, str(PUBLISHED_A_SECOND), str(lasting)]
    publishing = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.fleet.publisher", *arguments], stdout=subprocess.PIPE, text=True
    )
    taken = []
    while publishing.poll() is None:
        taken.append(seconds(lambda: hub.client.lookup(prompt, acquire=False)))
        time.sleep(0.005)
    published = int(publishing.communicate()[0]) if group == "followed" else 0
    _wait(lambda: hub.published() - before >= published, f"that the hub applies {published} chunks")
    p99 = sorted(taken)[len(taken) * 99 // 100]
    return p99, published, hub.cpu_seconds() - cpu, time.perf_counter() - began


def joining(server: RedisServer, place: Path, *, quick: bool) -> Iterator[Row]:
    """How long a new hub takes to know everything, and the memory that this takes."""
    runs = (20_000 if quick else 1_000_000) // CHUNKS_A_RUN
    publisher = Publisher(server.url, "joined")
    for _ in progress(range(runs), "publishing"):
        publisher.publish()
    chunks = runs * CHUNKS_A_RUN
    with _hub(server, place, "empty") as hub:
        empty = hub.own_bytes()
    with _hub(server, place, "joined") as hub:
        taken = seconds(lambda: _wait(lambda: hub.gauge("chunks") >= chunks, f"that a hub reads {chunks} chunks", 600))
        each = (hub.own_bytes() - empty) / (chunks * CHUNK)
    what = f"a new hub catches up with {chunks:,} chunks of {CHUNK} tokens"
    yield row("join_s", what, "s", [taken], None if quick else 60, "lower")
    what = "the memory that it takes for them, for each token"
    yield row("join_bytes_a_token", what, "bytes", [each], 8, "lower")
    a_minute = HUBS * EACH * 60 * CHUNK * each / 2**30
    on_paper = f"on paper: that memory for what {HUBS} hubs store in a minute, each {EACH} chunks a second"
    yield row("fleet_1000_gib_a_minute", on_paper, "GiB", [a_minute], better="lower")
