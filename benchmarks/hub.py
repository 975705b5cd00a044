"""How far the hub is from what its parts cost alone: lookups, growth.

The floor of a request is a bare ZeroMQ echo, without protocol, state or checks. The hub and the echo run in processes
of their own; every ratio is taken in turn.
"""

import contextlib
import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from benchmarks.report import Row, finish, parser, row
from benchmarks.stored import random_tokens, store
from benchmarks.timing import in_turn, progress, ratios
from blendhub import PluginHost, Span
from blendhub.client.hub_client import HubClient
from blendhub.core.layout import DEFAULT_MATCHERS, KVLayout, Namespace
from blendhub.hub.config import HubConfig
from blendhub.hub.embedded import HubInProcess
from blendhub.hub.limits import MAX_SLOTS_OF_AN_ARENA

SMALL = bytes(64)
LAYOUT = KVLayout(layers=1, kv_heads=1, key_dim=8, value_dim=8, dtype="int8")
NAMESPACE = Namespace(model="a model", layout=LAYOUT, matchers=DEFAULT_MATCHERS)
SPAWN = multiprocessing.get_context("spawn")


def main() -> None:
    options = parser(__doc__ or "").parse_args()
    scale = 20 if options.quick else 1
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder, _hub(1000) as client, _echo(Path(folder, "echo")) as echo:
        rows += lookups(client, echo, repeats=200 // scale)
    rows += growth(10_000 // scale, MAX_SLOTS_OF_AN_ARENA // (10 * scale if options.quick else 1))
    finish("hub", rows, "numpy pyzmq msgspec blendhub-transports", options.json)


def lookups(client: HubClient, echo: Callable[..., object], repeats: int) -> Iterator[Row]:
    """A prompt of 32,768 tokens, half of it stored, through the hub; and what its parts cost alone."""
    alone = [PluginHost.discover().create("matcher", choice.name, choice.options) for choice in DEFAULT_MATCHERS]
    for run in range(64):
        store(client, text := random_tokens(run))
        for matcher in alone:
            matcher.add(run, text, Span(0, len(text)))
    runs = np.random.default_rng(1).permutation([*range(8), *range(64, 72)])
    prompt = np.concatenate([random_tokens(run) for run in runs])
    jobs: dict[str, Callable[[], object]] = {
        "lookup": partial(_look_up, client, prompt),
        "floor": lambda: [echo(SMALL, prompt.data), *(matcher.match(prompt) for matcher in alone)],
    }
    taken = in_turn(jobs, repeats)
    what = "lookup of 32,768 tokens, half of them stored, relative to an echo of its bytes and the matchers alone"
    yield row("lookup_32k_vs_floor", what, "x", ratios(taken["lookup"], taken["floor"]), 1.3, "lower")


def growth(few: int, many: int) -> Iterator[Row]:
    """Lookups with as many stored chunks as an arena holds against few, in two hubs; slots are small."""
    prompt = np.concatenate([random_tokens(run if run % 2 == 0 else 10_000_000 + run) for run in range(16)])
    jobs: dict[str, Callable[[], object]] = {}
    with contextlib.ExitStack() as stack:
        for name, n_chunks in (("few", few), ("many", many)):
            client = stack.enter_context(_hub(n_chunks))
            for run in progress(range(n_chunks * LAYOUT.chunk_tokens // 2048), f"{n_chunks:,} chunks"):
                store(client, random_tokens(run))
            jobs[name] = partial(_look_up, client, prompt)
        taken = in_turn(jobs, 50, warm_up=10)
    what = f"time of a 32,768-token lookup with {many:,} chunks stored, relative to {few:,}"
    yield row("scale_lookup", what, "x", ratios(taken["many"], taken["few"]), 1.3, "lower")


@contextlib.contextmanager
def _hub(n_chunks: int) -> Iterator[HubClient]:
    """The client of a hub whose arena holds this number of chunks. The hub runs in its own process."""
    config = HubConfig(arena_gib=1.1 * n_chunks * NAMESPACE.slot_bytes / 2**30, metrics="")
    with HubInProcess(config) as hub, hub.connect() as client:
        client.register("benchmark", NAMESPACE, rank=0)
        yield client


@contextlib.contextmanager
def _echo(path: Path) -> Iterator[Callable[..., list[bytes]]]:
    """Sends frames to an echo in a process, and returns them when they come back."""
    process = SPAWN.Process(target=_serve_echo, args=(endpoint := f"ipc://{path}",), daemon=True)
    process.start()

    def call(*frames: Any) -> list[bytes]:
        socket.send_multipart(frames)
        return socket.recv_multipart()

    try:
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.connect(endpoint)  # what is sent before the echo listens is served when it does
            yield call
    finally:
        process.kill()
        process.join()


def _serve_echo(endpoint: str) -> None:
    socket = zmq.Context().socket(zmq.ROUTER)
    socket.bind(endpoint)
    while True:
        socket.send_multipart(socket.recv_multipart())


def _look_up(client: HubClient, prompt: np.ndarray) -> object:
    return client.lookup(prompt, acquire=False).result()


if __name__ == "__main__":
    main()
