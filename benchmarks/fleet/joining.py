"""How long a new hub takes to know everything, and the memory that this takes."""

import time
from pathlib import Path

from benchmarks.fleet.hubs import CHUNK, EACH, HUBS, running_hub
from benchmarks.fleet.publisher import CHUNKS_A_RUN, Publisher
from benchmarks.report import Row, row
from benchmarks.timing import progress
from harness.servers.redis_server import RedisServer

MOST_S = 600.0


def rows(server: RedisServer, place: Path, *, quick: bool) -> list[Row]:
    runs = (20_000 if quick else 1_000_000) // CHUNKS_A_RUN
    publisher = Publisher(server.url, "joined")
    for _ in progress(range(runs), "publishing"):
        publisher.publish()
    chunks = runs * CHUNKS_A_RUN
    with running_hub(server, place, "empty") as hub:
        empty = hub.own_bytes()
    with running_hub(server, place, "joined") as hub:
        began = time.perf_counter()
        while hub.gauge("chunks") < chunks:
            if time.perf_counter() - began > MOST_S:
                raise TimeoutError(f"the hub knows {hub.gauge('chunks'):.0f} of {chunks} chunks after {MOST_S:g} s")
            time.sleep(0.05)
        taken = time.perf_counter() - began
        each = (hub.own_bytes() - empty) / (chunks * CHUNK)
    what = f"a new hub catches up with {chunks:,} chunks of {CHUNK} tokens"
    bar = None if quick else 60
    a_minute = HUBS * EACH * 60 * CHUNK * each / 2**30
    on_paper = f"on paper: that memory for what {HUBS} hubs store in a minute, each {EACH} chunks a second"
    return [
        row("join_s", what, "s", [taken], bar, "lower"),
        row("join_bytes_a_token", "the memory that it takes for them, for each token", "bytes", [each], 8, "lower"),
        row("fleet_1000_gib_a_minute", on_paper, "GiB", [a_minute], better="lower"),
    ]
