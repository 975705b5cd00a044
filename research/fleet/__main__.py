"""A fleet of hubs: how soon one finds what another stored, what following costs, and how long joining takes.

The hubs have a place of bytes in shared memory.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.memory import own_bytes
from benchmarks.report import Row, finish, parser, row
from benchmarks.stored import random_tokens, store
from benchmarks.timing import progress, seconds
from blendhub.client.hub_client import HubClient
from blendhub.hub.config import HubConfig, StoreChoice
from blendhub.hub.embedded import HubInProcess
from harness.servers.redis_server import RedisServer
from harness.waiting import wait_until
from research.fleet.publisher import CHUNK, CHUNKS_A_RUN, NAMESPACE, Publisher

STORED_A_SECOND, PUBLISHED_A_SECOND = 50, 10_000
PATIENCE_S = 60.0


class Member:
    """A hub of a fleet, a client of it, and what its process takes."""

    def __init__(self, hub: HubInProcess, client: HubClient) -> None:
        self.pid, self.client = hub.pid, client
        self.client.register("benchmark", NAMESPACE, rank=0)

    def has_found(self, tokens: np.ndarray) -> bool:
        """Whether a lookup finds all of it, here or elsewhere."""
        answer = self.client.lookup(tokens, acquire=False).result()
        return sum(len(match.span) for match in answer.matches) + answer.on_the_way_tokens == len(tokens)

    def gauge(self, name: str) -> float:
        return self.client.stats().result().gauges[name]

    def cpu_seconds(self) -> float:
        """The CPU seconds of all threads of the process since its start."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(") ")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def _member(redis: RedisServer, place: Path, group: str) -> Iterator[Member]:
    options = {"catalogue": redis.url, "path": str(place), "group": group, "deadline_s": 10.0}
    config = HubConfig(arena_gib=0.1, store=StoreChoice("shared_directory", options), metrics="")
    with HubInProcess(config) as hub, hub.connect() as client:
        yield Member(hub, client)


def finding(place: Path, *, quick: bool) -> Iterator[Row]:
    """From the commit of a chunk on one hub to the first lookup on another that finds it."""
    times = []
    with (
        RedisServer() as redis,
        _member(redis, place, "found") as writer,
        _member(redis, place, "found") as finder,
    ):
        wait_until(lambda: min(writer.gauge("fleet_hubs"), finder.gauge("fleet_hubs")) >= 2, PATIENCE_S)
        begun = time.perf_counter()
        for number in range(STORED_A_SECOND * (3 if quick else 31)):
            time.sleep(max(0.0, begun + number / STORED_A_SECOND - time.perf_counter()))
            tokens = random_tokens(number, CHUNK)
            stored_at = time.perf_counter()
            store(writer.client, tokens)
            wait_until(partial(finder.has_found, tokens), PATIENCE_S, every_s=0.001)
            times.append(1e3 * (time.perf_counter() - stored_at))
    times = sorted(times[STORED_A_SECOND:])  # the first ones warm up
    what = f"from commit on one hub to a match on the other, chunks of {CHUNK} tokens, {STORED_A_SECOND} a second"
    yield row("found_elsewhere_ms", f"{what}; median", "ms", times, 50, "lower")
    p99 = times[len(times) * 99 // 100]
    yield row("found_elsewhere_p99_ms", "the same, 99 of 100 are faster", "ms", [p99], 250, "lower")


def events(place: Path, *, quick: bool) -> Iterator[Row]:
    """Lookups beside changes of other hubs, and what a change costs.

    Another process publishes as fast in both cases: in the group that the hub follows, or in another one.
    """
    rounds, lasting = (2, 1.5) if quick else (7, 4.0)
    ratios, costs = [], []
    with RedisServer() as redis, _member(redis, place, "followed") as hub:
        pieces = [random_tokens(seed, 2048) for seed in range(16)]
        for piece in pieces[::2]:
            store(hub.client, piece)
        prompt = np.concatenate(pieces)
        beside = partial(_lookups_beside_publisher, hub, prompt, redis.url, lasting=lasting)
        beside("followed")  # warms up
        for _ in progress(range(rounds), "lookups beside changes"):
            idle_p99, idle_cpu, _ = beside("another")
            p99, cpu, applied = beside("followed")
            ratios.append(p99 / idle_p99)
            costs.append(1e6 * max(cpu - idle_cpu, 0.0) / applied)
    what = f"p99 of lookups of {len(prompt):,} tokens while {PUBLISHED_A_SECOND:,} chunks a second are published"
    yield row("lookup_beside_events", f"{what}, relative to none", "x", ratios, 2, "lower")
    what = "the hub's processor time for a chunk of another hub that becomes matchable"
    yield row("chunk_event_us", what, "us", costs, better="lower")


def _lookups_beside_publisher(
    hub: Member, prompt: np.ndarray, url: str, group: str, lasting: float
) -> tuple[float, float, int]:
    """The p99 of lookups, the hub's processor time, and the chunks that were published to it."""
    counter = "fleet_published_chunks"
    before, cpu = hub.client.stats().result().counters[counter], hub.cpu_seconds()
    command = [sys.executable, "-m", "research.fleet.publisher", url, group, str(PUBLISHED_A_SECOND), str(lasting)]
    publisher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    times = []
    while publisher.poll() is None:
        times.append(seconds(lambda: hub.client.lookup(prompt, acquire=False).result()))
        time.sleep(0.005)
    published = int(publisher.communicate()[0]) if group == "followed" else 0
    wait_until(lambda: hub.client.stats().result().counters[counter] - before >= published, PATIENCE_S)
    return sorted(times)[len(times) * 99 // 100], hub.cpu_seconds() - cpu, published


def joining(place: Path, *, quick: bool) -> Iterator[Row]:
    """How long a new hub takes to know everything, and the memory that this takes."""
    runs = (20_000 if quick else 1_000_000) // CHUNKS_A_RUN
    chunks = runs * CHUNKS_A_RUN
    with RedisServer() as redis:
        publisher = Publisher(redis.url, "joined")
        for _ in progress(range(runs), "publishing"):
            publisher.publish()
        with _member(redis, place, "empty") as hub:
            empty = own_bytes(hub.pid)
        with _member(redis, place, "joined") as hub:
            times = [seconds(lambda: wait_until(lambda: hub.gauge("chunks") >= chunks, 600))]
            bytes_a_token = (own_bytes(hub.pid) - empty) / (chunks * CHUNK)
    what = f"a new hub catches up with {chunks:,} chunks of {CHUNK} tokens"
    yield row("join_s", what, "s", times, None if quick else 60, "lower")
    what = "the memory that it takes for them, for each token"
    yield row("join_bytes_a_token", what, "bytes", [bytes_a_token], 8, "lower")


PARTS = {part.__name__: part for part in (finding, events, joining)}


def main() -> None:
    options = parser(__doc__ or "", tuple(PARTS)).parse_args()
    rows: list[Row] = []
    for name in options.only:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            rows += PARTS[name](Path(folder), quick=options.quick)
    finish("fleet", rows, "redis hiredis blendhub-fleet blendhub-matchers", options.json)


if __name__ == "__main__":
    main()
