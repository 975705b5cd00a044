"""Publishes runs in the catalogue as another hub would, without bytes: ``python -m benchmarks.fleet.publisher``."""

import sys
import time

import msgspec
import numpy as np
from blendhub_fleet.catalogue import SharedCatalogue
from blendhub_fleet.options import FleetOptions
from blendhub_fleet.records import Record, encode_record

from blendhub.contracts import RunKey, StoredRun
from blendhub.core.layout import DEFAULT_MATCHERS, KVLayout, Namespace
from blendhub.core.provenance import EXACT
from blendhub.core.spans import Span
from blendhub.hub.stores.store_writer import RunDescription

CHUNK, CHUNKS_A_RUN, VOCABULARY = 256, 32, 150_000
LAYOUT = KVLayout(layers=1, kv_heads=1, key_dim=1, value_dim=1, dtype="int8", chunk_tokens=CHUNK)
NAMESPACE = Namespace(model="a model", layout=LAYOUT, matchers=DEFAULT_MATCHERS)


class Publisher:
    """Each run is of 32 chunks with random tokens."""

    def __init__(self, url: str, group: str) -> None:
        self._catalogue = SharedCatalogue(FleetOptions(catalogue=url, group=group, capacity_gib=2**20, deadline_s=30.0))
        self._catalogue.begin()
        self._random = np.random.default_rng()
        self._about = msgspec.msgpack.encode(RunDescription(NAMESPACE, EXACT))
        record = encode_record(Record("0" * 32, (LAYOUT.shard_bytes,), (bytes(16),)))
        self._chunks = {Span(at * CHUNK, (at + 1) * CHUNK): record for at in range(CHUNKS_A_RUN)}

    def publish(self) -> None:
        key = RunKey(NAMESPACE.digest, self._random.bytes(16).hex())
        tokens = self._random.integers(0, VOCABULARY, CHUNKS_A_RUN * CHUNK, dtype=np.uint32).tobytes()
        run = StoredRun(key, tokens, self._about, ())
        self._catalogue.publish(self._catalogue.incarnation, run, key, self._chunks)


def main() -> None:
    """URL, group, chunks a second, and seconds; prints how many chunks were published."""
    url, group, rate, lasting = sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4])
    publisher = Publisher(url, group)
    begun, published = time.perf_counter(), 0
    while (now := time.perf_counter() - begun) < lasting:
        if published >= now * rate:
            time.sleep(0.001)
            continue
        publisher.publish()
        published += CHUNKS_A_RUN
    print(published)


if __name__ == "__main__":
    main()
