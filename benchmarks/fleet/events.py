"""Lookups beside changes of other hubs, and what a change costs.

Another process publishes as fast in both cases: in the group that the hub follows, or in one that it does not follow.
"""

import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from benchmarks.fleet.hubs import EACH, HUBS, BenchedHub, running_hub, text
from benchmarks.report import Row, row
from benchmarks.timing import progress, seconds
from harness.servers.redis_server import RedisServer

PER_SECOND = 10_000
PROMPT = 32_768
SETTLE_S = 60.0


def rows(server: RedisServer, place: Path, *, quick: bool) -> list[Row]:
    rounds, lasting = (2, 1.5) if quick else (7, 4.0)
    ratios, tails, costs, rates = [], [], [], []
    with running_hub(server, place, "followed") as hub:
        pieces = [text(seed, 2048) for seed in range(16)]
        for piece in pieces[::2]:
            hub.store(piece)
        prompt = np.concatenate(pieces)
        _beside(hub, prompt, server, "followed", lasting)  # warms up
        for _ in progress(range(rounds), "lookups beside changes"):
            alone, _, idle_cpu, _ = _beside(hub, prompt, server, "another", lasting)
            beside, applied, cpu, took = _beside(hub, prompt, server, "followed", lasting)
            ratios.append(_p99(beside) / _p99(alone))
            tails.append(1e3 * _p99(beside))
            costs.append(max(cpu - idle_cpu, 0.0) / applied)
            rates.append(applied / took)
    shares = [HUBS * EACH * cost for cost in costs]
    what = f"p99 of lookups of 32,768 tokens while {PER_SECOND:,} chunks a second are published, relative to none"
    return [
        row("lookup_beside_events", what, "x", ratios, 2, "lower"),
        row("lookup_beside_events_p99_ms", "the same in milliseconds", "ms", tails, better="lower"),
        row("chunks_applied_per_s", "chunks of another hub that became matchable meanwhile", "1/s", rates),
        row(
            "chunk_event_us", "the hub's processor time for one of them", "us", [1e6 * c for c in costs], better="lower"
        ),
        row("fleet_1000", f"on paper: {HUBS} x {EACH} a second x that time", "cores", shares, better="lower"),
    ]


def _beside(
    hub: BenchedHub, prompt: np.ndarray, server: RedisServer, group: str, lasting: float
) -> tuple[list[float], float, float, float]:
    """Times of lookups, chunks applied, the hub's processor time, and how long all of it took."""
    before, cpu, began = hub.count("fleet_published_chunks"), hub.cpu_seconds(), time.perf_counter()
    arguments = [server.url, group, str(PER_SECOND), str(lasting)]
    publishing = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.fleet.publisher", *arguments], stdout=subprocess.PIPE, text=True
    )
    taken = []
    while publishing.poll() is None:
        taken.append(seconds(lambda: hub.client.lookup(prompt, acquire=False)))
        time.sleep(0.005)
    published = int(publishing.communicate()[0]) if group == "followed" else 0
    deadline = time.monotonic() + SETTLE_S
    while hub.count("fleet_published_chunks") - before < published:
        if time.monotonic() > deadline:
            raise TimeoutError(f"the hub did not apply {published} chunks within {SETTLE_S:g} s")
        time.sleep(0.01)
    return taken, published, hub.cpu_seconds() - cpu, time.perf_counter() - began


def _p99(taken: list[float]) -> float:
    return sorted(taken)[len(taken) * 99 // 100]
