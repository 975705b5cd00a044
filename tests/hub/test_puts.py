"""Shards that come through the transport, from clients on other machines."""

import asyncio
import threading

import numpy as np
import pytest

from blendhub.client import wire
from blendhub.contracts import Envelope
from blendhub.core.errors import InvalidInput
from tests.hub.hub_direct import ELSEWHERE, LAYOUT, marks, namespace, spans_of, tokens


def test_a_slot_is_not_free_while_bytes_are_copied_into_it(make_hub, monkeypatch):
    """The client that sent them may be gone by then, and the lease too."""
    hub = make_hub(n_slots=2)
    member = hub.join(process=ELSEWHERE, maps=False)
    reserved = member.reserve(tokens(1, 64))
    ids = {"session": member.registered.session, "epoch": member.registered.epoch}
    put = wire.Put(**ids, lease=reserved.lease, position=0)
    begun, go_on = threading.Event(), threading.Event()
    copy = np.copyto

    def slowly(*arrays):
        begun.set()
        go_on.wait(10)
        copy(*arrays)

    async def give_up():
        asked = asyncio.ensure_future(hub.service.handle(b"peer", Envelope(put, [bytes(LAYOUT.shard_bytes)])))
        await asyncio.to_thread(begun.wait, 10)
        asked.cancel()
        await asyncio.wait([asked])
        assert asked.cancelled()

    monkeypatch.setattr(np, "copyto", slowly)
    hub.run(give_up())
    member.ask(wire.Abort, lease=reserved.lease)
    assert hub.state.writes.quarantined, "the slots were free while they were written"
    go_on.set()
    hub.run(asyncio.sleep(0.1))
    assert not hub.state.writes.quarantined
    assert hub.state.cache.arena.extents.free_bytes == hub.arena.name.size


def shard_of(text, slot, rank=0):
    shard = bytearray(LAYOUT.shard_bytes)
    shard[: len(slot.span) * 4] = marks(text, slot.span, rank).tobytes()
    return shard


def test_nothing_is_put_into_what_is_committed(hub):
    """Neither into chunks that can be read, nor into slots that this rank has committed."""
    two_ranks = namespace(world_size=2)
    ranks = [hub.join("e", rank, two_ranks, process=ELSEWHERE, maps=False) for rank in range(2)]
    text = tokens(1, 96)
    reserved = ranks[0].reserve(text)
    for rank, member in enumerate(ranks):
        for slot in reserved.slots:
            member.ask(wire.Put, [shard_of(text, slot, rank)], lease=reserved.lease, position=slot.span.start)
    ranks[0].commit(reserved, upto=64)
    ranks[1].commit(reserved, upto=32)
    garbage = bytes(LAYOUT.shard_bytes)
    for rank, position in ((0, 0), (1, 0), (0, 32)):
        with pytest.raises(InvalidInput, match="has committed up to"):
            ranks[rank].ask(wire.Put, [garbage], lease=reserved.lease, position=position)
    ranks[1].ask(wire.Put, [shard_of(text, reserved.slots[1], 1)], lease=reserved.lease, position=32)
    for member in ranks:
        member.commit(reserved)
    for member in ranks:
        found = member.read(text)
        assert spans_of(found)[-1] == (64, 96, True)
        member.check(found, text)
    onlooker = hub.join(rank=-1, namespace=two_ranks)
    second = onlooker.reserve(tokens(2, 32))
    with pytest.raises(InvalidInput, match="no shard"):
        onlooker.ask(wire.Put, [garbage], lease=second.lease, position=0)
