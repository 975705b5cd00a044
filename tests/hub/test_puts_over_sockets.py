"""What a client without shared memory stores through a real socket, without waiting for answers."""

import threading
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from blendhub.client import session as hub_session
from blendhub.client import wire
from blendhub.client.hub_client import HubClient
from blendhub.core.errors import Busy, HubError, InvalidInput
from blendhub.core.layout import Variant
from blendhub.core.spans import Span
from blendhub.hub import limits, service
from blendhub.hub.config import HubConfig
from blendhub.hub.embedded import embedded_hub
from tests.hub.hub_direct import CHUNK, LAYOUT, namespace, tokens

N = 60
WIDE = namespace(layout=msgspec.structs.replace(LAYOUT, layers=8, kv_heads=8, key_dim=64, value_dim=64))
CONFIG = HubConfig(arena_gib=2 * N * WIDE.slot_bytes / 2**30, metrics="")
THEIRS, OURS = (Variant(cache_salt=salt) for salt in ("theirs", "ours"))


@pytest.fixture
def far(monkeypatch) -> Iterator[HubClient]:
    """A client that cannot map the arena, of a hub whose free slots hold another salt's KV."""

    def elsewhere(name):
        raise HubError("the arena is on another machine")

    with embedded_hub(CONFIG) as hub:
        with HubClient(hub.endpoint) as near:
            near.register("near", WIDE, rank=0)
            reserved = near.reserve(tokens(1, 2 * N * CHUNK), Span(0, 2 * N * CHUNK), THEIRS)
            for slot in reserved.slots:
                near.shard(slot.slot)[:] = 255
            near.commit(reserved.right, reserved.span.end)
            near.clear()
        monkeypatch.setattr(hub_session, "ArenaView", elsewhere)
        with HubClient(hub.endpoint) as client:
            client.register("far", WIDE, rank=0)
            assert client.arena is None
            yield client


def fetched(client: HubClient, text) -> list[np.ndarray]:
    found = client.lookup(text, OURS)
    if found.lease is None:
        return []
    shards = client.submit_fetch(found.lease, [piece.shard for piece in found.pieces]).payload()
    return [np.frombuffer(shard, np.uint8) for shard in shards]


def test_a_commit_that_follows_its_put_at_once_publishes_what_was_put(far):
    shard = WIDE.slot_bytes * b"\7"
    texts = [tokens(seed, CHUNK) for seed in range(N)]
    sent = []
    for text in texts:
        reserved = far.reserve(text, Span(0, CHUNK), OURS)
        lease = reserved.right.lease
        sent.append(far._submit(wire.Done, wire.Put(**far._ids(), lease=lease, position=0), [shard]))
        sent.append(far._submit(wire.Done, wire.Commit(**far._ids(), lease=lease, upto=CHUNK)))
        # What is found now was published, and must be what was put.
        for part in fetched(far, text):
            assert (part == 7).all(), "a chunk was published before its bytes were in its slot"
    for pending in sent:
        pending.result()
    for text in texts:
        (part,) = fetched(far, text)
        assert (part == 7).all()


def test_nothing_that_was_not_put_is_published(far):
    text = tokens(2, N * CHUNK)
    reserved = far.reserve(text, Span(0, N * CHUNK), OURS)
    far.put(reserved.right, 0, bytes(WIDE.slot_bytes))
    far.put(reserved.right, 2 * CHUNK, bytes(WIDE.slot_bytes))
    for upto in (2 * CHUNK, N * CHUNK):
        with pytest.raises(InvalidInput, match=f"rank 0 has put no shard at position {CHUNK} of lease"):
            far._call(wire.Done, wire.Commit(**far._ids(), lease=reserved.right.lease, upto=upto))
    assert not fetched(far, text)
    far.put(reserved.right, CHUNK, bytes(WIDE.slot_bytes))
    far._call(wire.Done, wire.Commit(**far._ids(), lease=reserved.right.lease, upto=3 * CHUNK))
    assert [part.any() for part in fetched(far, text)] == [False] * 3, "bytes of another salt's KV"


def test_a_put_that_a_hub_is_too_busy_for_is_sent_again_until_the_timeout(far, monkeypatch):
    text = tokens(3, CHUNK)
    reserved = far.reserve(text, Span(0, CHUNK), OURS)
    with monkeypatch.context() as full:
        full.setattr(service, "MOST_WAITING_BYTES", 1)
        full.setattr(far, "_timeout", 0.05)
        with pytest.raises(Busy):
            far.put(reserved.right, 0, bytes(WIDE.slot_bytes))
    monkeypatch.setattr(service, "MOST_WAITING_BYTES", 1)
    again = threading.Timer(0.1, setattr, [service, "MOST_WAITING_BYTES", limits.MOST_WAITING_BYTES])
    again.start()
    far.put(reserved.right, 0, WIDE.slot_bytes * b"\7")
    again.join()
    far.commit(reserved.right, CHUNK)
    (part,) = fetched(far, text)
    assert (part == 7).all()
