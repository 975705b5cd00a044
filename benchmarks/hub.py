"""How far the hub is from what its parts cost alone: round trips, lookups, growth.

The floor of a request is a bare ZeroMQ echo, without protocol, state or checks. The hub and the echo run in processes
of their own; every ratio is taken in turn.
"""

import contextlib
import multiprocessing
import statistics
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from benchmarks.memory import own_bytes
from benchmarks.report import Row, arguments, finish, row
from benchmarks.timing import progress, seconds
from blendhub import PluginHost, Span
from blendhub.client import wire
from blendhub.client.hub_client import HubClient
from blendhub.contracts import Envelope
from blendhub.core.layout import DEFAULT_MATCHERS, KVLayout, Namespace
from blendhub.core.tokens import Tokens
from blendhub.hub.config import HubConfig, Listen
from blendhub.hub.embedded import HubInProcess, embedded_hub
from blendhub.hub.limits import MOST_SLOTS_OF_AN_ARENA

VOCABULARY = 150_000
SMALL = bytes(64)
# A slot of 32 MiB: 256 tokens of a model of 8 billion parameters.
LARGE = KVLayout(layers=32, kv_heads=8, key_dim=128, value_dim=128, dtype="bfloat16", chunk_tokens=256)
TINY = KVLayout(layers=1, kv_heads=1, key_dim=8, value_dim=8, dtype="int8")
SPAWN = multiprocessing.get_context("spawn")


def main() -> None:
    options = arguments(__doc__ or "")
    scale = 20 if options.quick else 1
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        endpoint = f"ipc://{folder}/hub"
        config = HubConfig(arena_gib=0.3, listen=(Listen(endpoint=endpoint),), metrics="")
        with embedded_hub(config, "process"), _echo(Path(folder, "echo")) as echo:
            rows += round_trips(endpoint, echo, blocks=40 // scale + 2)
            rows += lookups(endpoint, echo, repeats=200 // scale + 3)
    rows += growth(10_000 // scale, MOST_SLOTS_OF_AN_ARENA // scale)
    finish("hub", rows, ["python", "numpy", "pyzmq", "msgspec", "blendhub", "blendhub-transports"], options.json)


def round_trips(endpoint: str, echo: str, blocks: int) -> Iterator[Row]:
    """A small request and its reply, in blocks of 300, in turn with the echo."""
    ours, ratios = [], []
    with HubClient(endpoint) as client, _caller(echo) as call:
        client.register("round-trips", _namespace(LARGE), rank=0)
        ping = Envelope(wire.Ping(session=client._session.session, epoch=client.epoch))
        for block in progress(range(blocks), "round trips"):
            theirs = statistics.median(seconds(lambda: call(SMALL)) for _ in range(300))
            mine = statistics.median(seconds(lambda: client._connection.submit(ping, 5.0).result()) for _ in range(300))
            if block > 1:  # the first ones warm up
                ours.append(mine * 1e6)
                ratios.append(mine / theirs)
    yield row("rtt_vs_echo", "round trip of a small request, relative to a bare echo", "x", ratios, 2.0, "lower")
    yield row("rtt_p50_us", "the same in microseconds", "us", ours, better="lower")


def lookups(endpoint: str, echo: str, repeats: int) -> Iterator[Row]:
    """A prompt of 32,768 tokens, half of it stored, through the hub; and what its parts cost alone."""
    namespace = _namespace(TINY, "lookups")
    alone = [PluginHost.discover().create("matcher", choice.name, choice.options) for choice in namespace.matchers]
    ratios, ours = [], []
    with HubClient(endpoint) as client, _caller(echo) as call:
        client.register("lookups", namespace, rank=0)
        for run in range(64):
            _store(client, text := _text(run))
            for matcher in alone:
                matcher.add(run, text, Span(0, len(text)))
        runs = np.random.default_rng(1).permutation([*range(8), *range(64, 72)])
        prompt = np.concatenate([_text(run) for run in runs])

        def floor() -> None:
            call(SMALL, prompt.data)
            for matcher in alone:
                matcher.match(prompt)

        for _ in progress(range(repeats), "lookups"):
            mine = seconds(partial(_look_up, client, prompt))
            ratios.append(mine / seconds(floor))
            ours.append(mine * 1e6)
    what = "lookup of 32,768 tokens, half of them stored, relative to an echo of its bytes and the matchers alone"
    yield row("lookup_32k_vs_floor", what, "x", ratios, 1.3, "lower")
    yield row("lookup_32k_us", "the same in microseconds", "us", ours, better="lower")


def _look_up(client: HubClient, prompt: Tokens) -> None:
    client.lookup(prompt, acquire=False).result()


def growth(few: int, many: int) -> Iterator[Row]:
    """Lookups with as many stored chunks as an arena holds against few, in two hubs; slots are small."""
    namespace = _namespace(TINY, "growth")
    prompt = np.concatenate([_text(run if run % 2 == 0 else 10_000_000 + run) for run in range(16)])
    clients = []
    with contextlib.ExitStack() as stack:
        for n_chunks in (few, many):
            config = HubConfig(arena_gib=1.1 * n_chunks * namespace.slot_bytes / 2**30, metrics="")
            hub = stack.enter_context(HubInProcess(config))
            clients.append(stack.enter_context(hub.connect()))
            clients[-1].register("growth", namespace, rank=0)
            before = own_bytes(hub.pid)
            for run in progress(range(n_chunks * TINY.chunk_tokens // 2048), f"{n_chunks:,} chunks"):
                _store(clients[-1], _text(run))
            grown = own_bytes(hub.pid) - before
        ratios = []
        for turn in progress(range(60), "growth"):
            small, large = (seconds(partial(_look_up, client, prompt)) for client in clients)
            if turn > 9:  # the first ones warm up
                ratios.append(large / small)
    what = f"time of a 32,768-token lookup with {many:,} chunks stored, relative to {few:,}"
    yield row("scale_lookup", what, "x", ratios, 1.3, "lower")
    what = f"memory a chunk of {TINY.chunk_tokens} tokens, all told, without its KV"
    yield row("bytes_per_chunk", what, "bytes", [grown / many], better="lower")


@contextlib.contextmanager
def _echo(path: Path) -> Iterator[str]:
    """The echo's endpoint; it runs in a process."""
    process = SPAWN.Process(target=_serve_echo, args=(endpoint := f"ipc://{path}",), daemon=True)
    process.start()
    try:
        yield endpoint  # whoever connects before the echo listens is served when it does
    finally:
        process.kill()
        process.join()


def _serve_echo(endpoint: str) -> None:
    socket = zmq.Context().socket(zmq.ROUTER)
    socket.bind(endpoint)
    while True:
        socket.send_multipart(socket.recv_multipart())


@contextlib.contextmanager
def _caller(endpoint: str) -> Iterator[Callable[..., list[bytes]]]:
    """Sends frames to the echo, and returns them when they come back."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(endpoint)

        def call(*frames: Any) -> list[bytes]:
            socket.send_multipart(frames)
            return socket.recv_multipart()

        yield call


def _namespace(layout: KVLayout, model: str = "a model") -> Namespace:
    return Namespace(model=model, layout=layout, matchers=DEFAULT_MATCHERS)


def _text(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCABULARY, 2048, dtype=np.uint32)


def _store(client: HubClient, text: np.ndarray) -> None:
    reserved = client.reserve(text, Span(0, len(text)))
    if reserved.right is not None:
        client.commit(reserved.right, reserved.span.end)


if __name__ == "__main__":
    main()
