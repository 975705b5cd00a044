"""Chunks between hubs' arenas and Mooncake, beside Mooncake's own calls for as many bytes.

Mooncake's own calls are made by a process that does nothing else, from and into shared memory too; the two take turns.
"""

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from blendhub_mooncake.bytes import open_store
from blendhub_mooncake.options import MooncakeOptions

from benchmarks.report import Row, row
from benchmarks.timing import progress, seconds
from blendhub.client.arena_view import HEADER_BYTES, SHM
from blendhub.client.hub_client import HubClient
from blendhub.contracts import ArenaFile, RunKey, StoredRun
from blendhub.core.layout import KVLayout, Namespace
from blendhub.core.spans import Span
from blendhub.hub.memory.arena import Arena
from harness.servers.mooncake_cluster import Cluster, wait_until
from harness.servers.network import THIS
from harness.servers.redis_server import RedisServer
from harness.servers.served_hub import ServedHub

MIB = 2**20
# A chunk of 32 MiB: 256 tokens of a model of 8 billion parameters.
LARGE = KVLayout(layers=32, kv_heads=8, key_dim=128, value_dim=128, dtype="bfloat16", chunk_tokens=256)
STEP = LARGE.shard_bytes
N_CHUNKS = 64 * MIB // STEP
DOCUMENT = N_CHUNKS * LARGE.chunk_tokens
Text: TypeAlias = npt.NDArray[np.uint32]
DOCUMENTS = 4
"""Fetched in turn by a hub whose arena has room for one."""
READER_GIB, WRITER_GIB = 0.08, 0.3
WAIT_S = 60.0
GET_BAR, PUT_BAR = 0.85, 0.80
_RAW = """
import ctypes, mmap, sys, time
from mooncake.store import MooncakeDistributedStore
host, master, path, size = *sys.argv[1:4], int(sys.argv[4])
with open(path, "r+b") as file:
    memory = mmap.mmap(file.fileno(), size)
base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
store = MooncakeDistributedStore()
assert store.setup(host, "P2PHANDSHAKE", 0, 0, "tcp", "", master) == 0
assert store.register_buffer(base, size) == 0
print("ready", flush=True)
for line in sys.stdin:
    what, start, step, *keys = line.split()
    addresses = [base + int(start) + at * int(step) for at in range(len(keys))]
    sizes = [int(step)] * len(keys)
    begun = time.perf_counter()
    if what == "remove":
        store.batch_remove(keys)
    elif what == "get":
        assert store.batch_get_into(keys, addresses, sizes) == sizes
    else:
        assert store.batch_put_from(keys, addresses, sizes) == [0] * len(keys)
    print(time.perf_counter() - begun, flush=True)
"""


class Raw:
    """Mooncake's own calls, in another process, on an arena of their own."""

    def __init__(self, cluster: Cluster, arena: Arena) -> None:
        path, size = SHM / arena.name.segment, HEADER_BYTES + arena.name.size
        self._process = subprocess.Popen(
            [sys.executable, "-c", _RAW, THIS.address, cluster.address, str(path), str(size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._read() == "ready"

    def __call__(self, what: str, keys: list[str]) -> float:
        """The seconds that Mooncake took for 64 MiB under these keys."""
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join([what, str(HEADER_BYTES), str(STEP), *keys]) + "\n")
        self._process.stdin.flush()
        return float(self._read())

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def rows(server: RedisServer, place: Path, *, quick: bool) -> list[Row]:
    rounds = 2 if quick else 15
    with contextlib.ExitStack() as closing:
        cluster = closing.enter_context(Cluster())
        cluster.start_master()
        cluster.start_node(2**30)
        arena = closing.enter_context(contextlib.closing(Arena(N_CHUNKS * STEP)))
        arena.slot(0, N_CHUNKS * STEP)[:] = np.random.default_rng(1).bytes(N_CHUNKS * STEP)
        raw = closing.enter_context(contextlib.closing(Raw(cluster, arena)))
        place.mkdir()
        return [_puts(cluster, server, arena, raw, rounds), _gets(cluster, server, place, raw, rounds)]


def _puts(cluster: Cluster, server: RedisServer, arena: Arena, raw: Raw, rounds: int) -> Row:
    """Saves through the store that a hub's saves call: with checksums and the catalogue."""
    options = MooncakeOptions(catalogue=server.url, group="puts", master=cluster.address, transfer_deadline_s=60.0)
    ratios = []
    with contextlib.closing(open_store(options)) as store:
        memory = arena.slot(0, arena.name.size)
        store.attach(ArenaFile(str(SHM / arena.name.segment), HEADER_BYTES, arena.name.size), memory)
        store.snapshot()  # joins the fleet
        spans = [Span(at * LARGE.chunk_tokens, (at + 1) * LARGE.chunk_tokens) for at in range(N_CHUNKS)]
        chunks = [(span, [arena.slot(at * STEP, STEP)]) for at, span in enumerate(spans)]
        for turn in progress(range(1 + rounds), "storing 64 MiB"):
            key = RunKey("puts", f"run-{turn}")
            store.save_run(StoredRun(key, bytes(4 * DOCUMENT), b"", ()))
            names = [f"raw/put-{turn}/{at}" for at in range(N_CHUNKS)]
            ours = partial(store.save_chunks, key, chunks)
            ratios.append(_ratio(turn, partial(raw, "put", names), ours))
            for span in spans:
                store.discard(key, span)
            raw("remove", names)
    what = "storing 64 MiB out of an arena, with checksums and catalogue: speed, relative to Mooncake's own call"
    return row("put_vs_raw", what, "x", ratios[1:], PUT_BAR)


def _gets(cluster: Cluster, server: RedisServer, folder: Path, raw: Raw, rounds: int) -> Row:
    """Loads by lookups of a second hub, which did not store the texts: what one finds is then in that hub's arena."""
    names = [f"raw/get/{at}" for at in range(N_CHUNKS)]
    raw("put", names)
    options = {"catalogue": server.url, "group": "gets", "master": cluster.address, "transfer_deadline_s": "60"}
    texts = [np.random.default_rng(n).integers(0, 2**31, DOCUMENT, np.uint32) for n in range(DOCUMENTS)]
    ratios = []
    with (
        _hub(folder, "writer", WRITER_GIB, options) as writer,
        _hub(folder, "reader", READER_GIB, options) as reader,
    ):
        for text in texts:
            _store(writer, text)
        wait_until(lambda: all(_known(reader, text) == DOCUMENT for text in texts), WAIT_S)
        for turn in progress(range(DOCUMENTS + rounds), "fetching 64 MiB"):
            text = texts[turn % DOCUMENTS]
            ratios.append(_ratio(turn, partial(raw, "get", names), partial(_fetched, reader, text)))
    what = "fetching 64 MiB of chunks by a lookup into a hub's arena: speed, relative to Mooncake's own call"
    return row("get_vs_raw", what, "x", ratios[DOCUMENTS:], GET_BAR)


def _ratio(turn: int, raw: Callable[[], float], ours: Callable[[], object]) -> float:
    """The speed of ours relative to the raw one; they take turns at being first."""
    if turn % 2:
        taken = raw()
        return taken / seconds(ours)
    taken = seconds(ours)
    return raw() / taken


@contextlib.contextmanager
def _hub(folder: Path, name: str, arena_gib: float, options: dict[str, str]) -> Iterator[HubClient]:
    space = Namespace(model="a model of 8 billion parameters", layout=LARGE)
    with contextlib.closing(ServedHub(folder, name, arena_gib, options)) as hub, hub.client(space) as client:
        yield client


def _store(client: HubClient, text: Text) -> None:
    reserved = client.reserve(text, Span(0, len(text)))
    assert reserved.right and reserved.span == Span(0, len(text))
    for slot in reserved.slots:
        with client.writing(reserved.right):
            client.shard(slot.slot)[:] = np.random.default_rng(slot.slot).integers(0, 256, STEP, np.uint8)
    client.commit(reserved.right, len(text))


def _known(client: HubClient, text: Text) -> int:
    """The number of tokens of the text that the hub knows of, here or elsewhere."""
    found = client.lookup(text, acquire=False)
    return sum(len(match.span) for match in found.matches) + found.on_the_way_tokens


def _fetched(client: HubClient, text: Text) -> None:
    """Have all of a text in the arena."""
    found = client.lookup(text, acquire=False, wait_s=WAIT_S)
    assert sum(len(match.span) for match in found.matches) == len(text), found
