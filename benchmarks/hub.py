"""How far the hub is from what its parts cost alone: round trips, lookups, copies, growth.

The hub and the bare echo run in processes of their own; every ratio is taken in turn.
"""

import contextlib
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from benchmarks import echo
from benchmarks.memory import own_bytes
from benchmarks.report import Row, arguments, finish, row
from benchmarks.timing import progress, seconds, sorted_times
from blendhub import PluginHost, Span
from blendhub.client import wire
from blendhub.client.hub_client import HubClient
from blendhub.contracts import Envelope
from blendhub.core.layout import DEFAULT_MATCHERS, KVLayout, Namespace
from blendhub.hub.config import HubConfig, Listen
from blendhub.hub.embedded import HubInProcess, embedded_hub
from blendhub.hub.limits import MOST_SLOTS_OF_AN_ARENA

PROMPT = 32_768
VOCABULARY = 150_000
SMALL = bytes(64)
# A slot of 32 MiB: 256 tokens of a model of 8 billion parameters.
LARGE = KVLayout(layers=32, kv_heads=8, key_dim=128, value_dim=128, dtype="bfloat16", chunk_tokens=256)
TINY = KVLayout(layers=1, kv_heads=1, key_dim=1, value_dim=1, dtype="int8")
GROWTH = KVLayout(layers=1, kv_heads=1, key_dim=8, value_dim=8, dtype="int8")
"""With smaller slots, a full hub would refuse to keep more tokens than KV."""


def main() -> None:
    options = arguments(__doc__ or "")
    scale = 20 if options.quick else 1
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        endpoint, bare = f"ipc://{folder}/hub", f"ipc://{folder}/echo"
        config = HubConfig(arena_gib=0.3, listen=(Listen(endpoint=endpoint),), metrics="")
        with embedded_hub(config, "process"), echo.running(bare):
            rows += round_trips(endpoint, bare, blocks=40 // scale + 2)
            rows += lookups(endpoint, bare, repeats=200 // scale + 3)
            rows += pipelined(endpoint, bare, seconds=2.0 / scale + 0.3, rounds=3 if options.quick else 7)
            rows += copies(endpoint, repeats=60 // scale + 3)
    rows += growth(10_000 // scale, MOST_SLOTS_OF_AN_ARENA // scale)
    finish("hub", rows, ["python", "numpy", "pyzmq", "msgspec", "blendhub", "blendhub-transports"], options.json)


def round_trips(endpoint: str, bare: str, blocks: int) -> list[Row]:
    """A small request and its reply, in blocks of 300, in turn with the echo."""
    caller = echo.Caller(bare)
    ours, ratios = [], []
    with HubClient(endpoint) as client:
        client.register("round-trips", _namespace(LARGE), rank=0)
        ping = Envelope(wire.Ping(session=client._session.session, epoch=client.epoch))
        for block in progress(range(blocks), "round trips"):
            theirs = sorted_times(lambda: caller(SMALL), 300)
            mine = sorted_times(lambda: client._connection.submit(ping, 5.0).result(), 300)
            if block > 1:  # the first ones warm up
                ours.append(mine[150] * 1e6)
                ratios.append(mine[150] / theirs[150])
    caller.close()
    return [
        row("rtt_vs_echo", "round trip of a small request, relative to a bare echo", "x", ratios, 2.0, "lower"),
        row("rtt_p50_us", "the same in microseconds", "us", ours, better="lower"),
    ]


def lookups(endpoint: str, bare: str, repeats: int) -> list[Row]:
    """A prompt of 32,768 tokens, half of it stored, through the hub; and what its parts cost alone."""
    caller = echo.Caller(bare)
    namespace = _namespace(TINY, "lookups")
    alone = [PluginHost.discover().create("matcher", choice.name, choice.options) for choice in namespace.matchers]
    random = np.random.default_rng(1)
    chunk_matches = []
    with HubClient(endpoint) as client:
        client.register("lookups", namespace, rank=0)
        for run in range(64):
            text = _text(run, 2048)
            _store(client, text)
            for matcher in alone:
                matcher.add(run, text, Span(0, len(text)))
            if run < 8:
                chunk_matches += [text, _text(1000 + run, 2048)]
        prompt = np.concatenate([chunk_matches[at] for at in random.permutation(len(chunk_matches))])
        ratios, ours = [], []
        for _ in progress(range(repeats), "lookups"):
            mine = seconds(lambda: client.lookup(prompt, acquire=False))
            floor = seconds(lambda: caller(SMALL, prompt.data)) + seconds(lambda: [m.match(prompt) for m in alone])
            ratios.append(mine / floor)
            ours.append(mine * 1e6)
    caller.close()
    what = "lookup of 32,768 tokens, half of them stored, relative to an echo of its bytes and the matchers alone"
    return [
        row("lookup_32k_vs_floor", what, "x", ratios, 1.3, "lower"),
        row("lookup_32k_us", "the same in microseconds", "us", ours, better="lower"),
    ]


def pipelined(endpoint: str, bare: str, seconds: float, rounds: int) -> list[Row]:
    """Eight processes, each with sixteen small requests under way."""
    ratios, ours = [], []
    for _ in progress(range(rounds), "pipelined"):
        theirs = _together(_pipeline_bare, bare, seconds)
        mine = _together(_pipeline_hub, endpoint, seconds)
        ratios.append(mine / theirs)
        ours.append(mine)
    what = "requests a second of 8 processes with 16 under way each, relative to a bare echo"
    return [row("pipelined_vs_echo", what, "x", ratios, 0.35), row("pipelined_per_s", "the same", "1/s", ours)]


UNDER_WAY = 16


def _together(work: Callable[..., None], endpoint: str, seconds: float) -> float:
    """Requests a second of eight processes that begin together."""
    processes = multiprocessing.get_context("spawn")
    start, done = processes.Barrier(9), processes.Queue()
    clients = [processes.Process(target=work, args=(endpoint, seconds, start, done, n), daemon=True) for n in range(8)]
    for client in clients:
        client.start()
    start.wait(120)
    total = sum(done.get(timeout=60 + seconds) for _ in clients)
    for client in clients:
        client.join()
    return total / seconds


def _pipeline_bare(endpoint: str, seconds: float, start: Any, done: Any, number: int) -> None:
    caller = echo.Caller(endpoint)
    caller(SMALL)
    start.wait(120)
    until, count = time.perf_counter() + seconds, 0
    for _ in range(UNDER_WAY):
        caller.socket.send(SMALL)
    while time.perf_counter() < until:
        caller.socket.recv()
        caller.socket.send(SMALL)
        count += 1
    done.put(count)


def _pipeline_hub(endpoint: str, seconds: float, start: Any, done: Any, number: int) -> None:
    with HubClient(endpoint) as client:
        client.register(f"pipeline-{number}", _namespace(LARGE), rank=0)
        ping = Envelope(wire.Ping(session=client._session.session, epoch=client.epoch))
        start.wait(120)
        until, count = time.perf_counter() + seconds, 0
        under_way = [client._connection.submit(ping, 30.0) for _ in range(UNDER_WAY)]
        while time.perf_counter() < until:
            under_way.pop(0).result()
            under_way.append(client._connection.submit(ping, 30.0))
            count += 1
        done.put(count)


def copies(endpoint: str, repeats: int) -> list[Row]:
    """32 MiB into and out of the arena, in turn with the same between ordinary arrays."""
    size = LARGE.shard_bytes
    source, target = (np.full(size, fill, np.uint8) for fill in (1, 2))
    # More than a cache holds. What one copy left there must not help the next one, on either side.
    between = np.ones(3 * size // 8, np.int64)

    def cold(to: np.ndarray, from_: np.ndarray) -> float:
        between.sum()
        return seconds(lambda: np.copyto(to, from_))

    text = _text(77, LARGE.chunk_tokens)
    into, out = [], []
    with HubClient(endpoint) as client:
        client.register("copies", _namespace(LARGE), rank=0)
        reserved = client.reserve(text, Span(0, len(text)))
        shard = client.shard(reserved.slots[0].slot)
        np.copyto(shard, source)  # touches its pages
        for _ in progress(range(repeats), "copies"):
            into.append(cold(target, source) / cold(shard, source))
            out.append(cold(target, source) / cold(target, shard))
        assert reserved.right
        client.abort(reserved.right)
    return [
        row("arena_in_vs_memcpy", "speed of 32 MiB into the arena, relative to numpy between arrays", "x", into, 0.9),
        row("arena_out_vs_memcpy", "the same out of the arena", "x", out, 0.9),
    ]


def growth(few: int, many: int) -> list[Row]:
    """Lookups with as many stored chunks as an arena holds against few, in two hubs; slots are small."""
    namespace = _namespace(GROWTH, "growth")
    texts = [_text(10_000_000 + run, 2048) if run % 2 else _text(run, 2048) for run in range(16)]
    prompt = np.concatenate(texts)
    with contextlib.ExitStack() as stack:
        clients = {}
        for n_chunks in (few, many):
            config = HubConfig(arena_gib=1.1 * n_chunks * namespace.slot_bytes / 2**30, metrics="")
            hub = stack.enter_context(HubInProcess(config))
            client = clients[n_chunks] = stack.enter_context(hub.connect())
            client.register("growth", namespace, rank=0)
            before = own_bytes(hub._process.pid)
            for run in progress(range(n_chunks * GROWTH.chunk_tokens // 2048), f"{n_chunks:,} chunks"):
                _store(client, _text(run, 2048))
            grown = own_bytes(hub._process.pid) - before
        ratios = []
        for turn in progress(range(60), "growth"):
            large, small = (seconds(partial(clients[n].lookup, prompt, acquire=False)) for n in (many, few))
            if turn > 9:  # the first ones warm up
                ratios.append(large / small)
    what = f"time of a 32,768-token lookup with {many:,} chunks stored, relative to {few:,}"
    per_chunk = f"memory a chunk of {GROWTH.chunk_tokens} tokens, all told, without its KV"
    return [
        row("scale_lookup", what, "x", ratios, 1.3, "lower"),
        row("bytes_per_chunk", per_chunk, "bytes", [grown / many], better="lower"),
    ]


def _namespace(layout: KVLayout, model: str = "a model") -> Namespace:
    return Namespace(model=model, layout=layout, matchers=DEFAULT_MATCHERS)


def _text(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCABULARY, length, dtype=np.uint32)


def _store(client: HubClient, text: np.ndarray) -> None:
    reserved = client.reserve(text, Span(0, len(text)))
    if reserved.right is not None:
        client.commit(reserved.right, reserved.span.end)


if __name__ == "__main__":
    main()
