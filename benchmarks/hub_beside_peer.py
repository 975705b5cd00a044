"""The hub and its client beside the peer's server and worker, which do the same work, in turn."""

import statistics
from collections.abc import Sequence

import numpy as np

from benchmarks.peer import PeerProcess, peer_server
from benchmarks.report import Planned, Row, rows_of
from benchmarks.timing import progress, seconds, sorted_times
from blendhub import PluginHost, Span
from blendhub.client import wire
from blendhub.client.hub_client import HubClient
from blendhub.client.write_rights import WriteRight
from blendhub.contracts import Envelope, PagedLayer, Segment
from blendhub.core.layout import DEFAULT_MATCHERS, KVLayout, Namespace
from blendhub.core.tokens import Tokens

LAYOUT = KVLayout(layers=8, kv_heads=8, key_dim=128, value_dim=128, dtype="bfloat16", chunk_tokens=256)
SPACE = Namespace(model="beside", layout=LAYOUT, matchers=DEFAULT_MATCHERS)
CHUNKS = 8
TOKENS = CHUNKS * LAYOUT.chunk_tokens
BLOCK = 128
"""Tokens of a block of pages: what suits the peer best, since it copies block by block."""

ROWS = {
    "rtt_vs_peer": Planned("round trip of a ping, relative to the peer's of a request that does nothing", "x", 0.6),
    "store_vs_peer": Planned("time to store 64 MiB of an engine's pages, relative to the peer's worker", "x", 0.5),
    "retrieve_vs_peer": Planned(
        "time to look them up and copy them back into pages, relative to the peer's worker", "x", 0.7
    ),
    "store_bytes_vs_peer": Planned(
        "time to store 64 MiB that lie in one piece, relative to the same into the peer's slots", "x"
    ),
    "retrieve_bytes_vs_peer": Planned(
        "time to look them up and copy them out, relative to the same from the peer's slots", "x"
    ),
}


def beside_the_peer(endpoint: str, python: str, repeats: int) -> list[Row]:
    """Round trips; eight chunks of 8 MiB from an engine's pages and back; the same as bytes that lie in one piece."""
    found: dict[str, list[float]] = {}
    with peer_server(python) as port, HubClient(endpoint) as client:
        peer = PeerProcess(python, "peer_hub.py", str(port))
        client.register("beside", SPACE, rank=0)
        ours = _Worker(client)
        ping = Envelope(wire.Ping(session=client._session.session, epoch=client.epoch))
        for turn in progress(range(repeats), "beside the peer"):
            first = turn * TOKENS
            text = np.arange(first, first + TOKENS, dtype=np.uint32)
            trip = statistics.median(sorted_times(lambda: client._connection.call(ping, 5.0), 200))
            ratios = {"rtt": trip / statistics.median(peer("round_trips", 200))}
            for what in ("store", "retrieve", "store_bytes", "retrieve_bytes"):
                theirs = peer(what, first)
                ratios[what] = seconds(lambda: getattr(ours, what)(text)) / theirs  # noqa: B023
                if what.startswith("retrieve"):
                    client.clear()
                    peer("clear")
            if turn:  # the first one warms up
                for what, ratio in ratios.items():
                    found.setdefault(f"{what}_vs_peer", []).append(ratio)
        ours.close()
        peer.close()
    return rows_of(ROWS, found)


class _Worker:
    """What a worker of an engine does with its KV."""

    def __init__(self, client: HubClient) -> None:
        # Here, because the processes of the other measurements import this module, and this takes seconds.
        import torch

        self._client = client
        self._bytes = [np.full(LAYOUT.shard_bytes, fill, np.uint8) for fill in (1, 2)]
        n_blocks = 2 * TOKENS // BLOCK
        shape = (n_blocks, LAYOUT.kv_heads, BLOCK, LAYOUT.key_dim + LAYOUT.value_dim)
        self._pages = [torch.randn(shape).to(torch.bfloat16) for _ in range(LAYOUT.layers)]
        blocks = np.random.default_rng(1).permutation(n_blocks).astype(np.int64)
        self._stored_from, self._brought_to = np.split(blocks, 2)
        self._device = PluginHost.discover().create("device", "cpu", {})
        layers = [PagedLayer(str(n), "packed_heads", (pages,)) for n, pages in enumerate(self._pages)]
        self._device.attach(layers, BLOCK, LAYOUT)
        assert client.arena
        self._device.pin(client.arena.bytes)

    def store(self, text: Tokens) -> None:
        right, slots = self._room(text)
        with self._client.writing(right):
            segments = [Segment(one.span, one.slot, 0, one.span.start) for one in slots]
            self._device.save(segments, self._stored_from).wait()
        self._client.commit(right, len(text))

    def retrieve(self, text: Tokens) -> None:
        with self._client.reading(self._client.lookup(text)) as pieces:
            segments = [Segment(one.span, one.shard, one.row, one.source_start) for one in pieces]
            assert sum(len(one.span) for one in segments) == TOKENS
            self._device.load(segments, self._brought_to).wait()

    def store_bytes(self, text: Tokens) -> None:
        right, slots = self._room(text)
        with self._client.writing(right):
            for slot in slots:
                np.copyto(self._client.shard(slot.slot), self._bytes[0])
        self._client.commit(right, len(text))

    def retrieve_bytes(self, text: Tokens) -> None:
        with self._client.reading(self._client.lookup(text)) as pieces:
            assert len(pieces) == CHUNKS
            for piece in pieces:
                np.copyto(self._bytes[1], self._client.shard(piece.shard))

    def close(self) -> None:
        self._device.close()
        for pages in self._pages:
            if not pages[self._brought_to].equal(pages[self._stored_from]):
                raise SystemExit("what was brought back is not what was stored")

    def _room(self, text: Tokens) -> tuple[WriteRight, Sequence[wire.Slot]]:
        reserved = self._client.reserve(text, Span(0, len(text)))
        assert reserved.right is not None and len(reserved.slots) == CHUNKS
        return reserved.right, reserved.slots
