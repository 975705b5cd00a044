"""From the commit of a chunk on one hub to the first lookup on another that finds it."""

import threading
import time
from collections import deque
from pathlib import Path

import numpy as np

from benchmarks.fleet.hubs import CHUNK, BenchedHub, running_hub, text
from benchmarks.report import Row, row
from harness.servers.redis_server import RedisServer

PER_SECOND = 50
POLL_S = 0.001
MOST_S = 30.0


def rows(server: RedisServer, place: Path, *, quick: bool) -> list[Row]:
    n = PER_SECOND * (2 if quick else 30)
    with running_hub(server, place, "found") as one, running_hub(server, place, "found") as other:
        while one.gauge("fleet_hubs") < 2 or other.gauge("fleet_hubs") < 2:
            time.sleep(0.05)
        _found_after(one, other, range(PER_SECOND))  # the first ones warm up
        taken = sorted(_found_after(one, other, range(PER_SECOND, PER_SECOND + n)))
    what = f"from commit on one hub to a match on the other, chunks of {CHUNK} tokens, {PER_SECOND} a second"
    p99 = taken[len(taken) * 99 // 100]
    return [
        row("found_elsewhere_ms", f"{what}; median", "ms", [1e3 * one for one in taken], 50, "lower"),
        row("found_elsewhere_p99_ms", "the same, 99 of 100 are faster", "ms", [1e3 * p99], 250, "lower"),
    ]


def _found_after(one: BenchedHub, other: BenchedHub, seeds: range) -> list[float]:
    waiting: deque[tuple[float, np.ndarray]] = deque()

    def write() -> None:
        began = time.perf_counter()
        for place, seed in enumerate(seeds):
            time.sleep(max(0.0, began + place / PER_SECOND - time.perf_counter()))
            tokens, at = text(seed, CHUNK), time.perf_counter()
            one.store(tokens)
            waiting.append((at, tokens))

    writer = threading.Thread(target=write)
    writer.start()
    taken: list[float] = []
    deadline = time.monotonic() + len(seeds) / PER_SECOND + MOST_S
    while len(taken) < len(seeds):
        if waiting and other.knows(waiting[0][1]):
            taken.append(time.perf_counter() - waiting.popleft()[0])
            continue
        if time.monotonic() > deadline:
            raise TimeoutError(f"{len(seeds) - len(taken)} chunks of {len(seeds)} were not found within {MOST_S:g} s")
        time.sleep(POLL_S)
    writer.join()
    return taken
