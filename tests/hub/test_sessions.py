"""Sessions of a hub's service: who joins, who dies, and what becomes of the leases."""

import pytest

from blendhub.client import wire
from blendhub.client.arena_view import ArenaView
from blendhub.core.errors import InvalidInput, LayoutMismatch, LeaseError
from blendhub.core.layout import KVLayout
from blendhub.system.processes import ProcessId
from tests.hub.hub_direct import CHUNK, ELSEWHERE, namespace, tokens

TEXT = tokens(1, 64)


def test_who_cannot_be_part_of_an_engine_is_refused(hub):
    wide = namespace(world_size=2)
    hub.join(namespace=wide)
    layout = KVLayout(layers=2, kv_heads=1, key_dim=8, value_dim=4, dtype="float16", chunk_tokens=CHUNK)
    with pytest.raises(LayoutMismatch, match=r"layout is .*key_dim=4.* there and .*key_dim=8"):
        hub.join(rank=1, namespace=namespace(world_size=2, layout=layout))
    with pytest.raises(InvalidInput, match="rank 0 of engine 'e' is registered already"):
        hub.join(namespace=wide)
    with pytest.raises(InvalidInput, match="not below its world size"):
        hub.join(rank=2, namespace=wide)
    with pytest.raises(InvalidInput, match="does not run"):
        hub.join("another", process=ProcessId(ProcessId.mine().host, 2**22 + 1, 5))


def test_a_lease_ends_once_and_only_for_its_owner(hub):
    member, other = hub.join(), hub.join("other")
    member.store(TEXT)
    found = member.lookup(TEXT)
    with pytest.raises(InvalidInput, match="holds already"):
        member.ask(wire.Lookup, [TEXT.tobytes()], lease=found.lease)
    with pytest.raises(LeaseError, match="another engine"):
        other.ask(wire.Release, lease=found.lease)
    member.ask(wire.Release, lease=found.lease)
    with pytest.raises(LeaseError, match="does not hold"):
        member.ask(wire.Release, lease=found.lease)
    with pytest.raises(LeaseError, match="another engine"):
        other.commit(member.reserve(tokens(2, 64)))


def test_leases_last_as_long_as_their_session_pings(make_hub):
    hub = make_hub(silence_s=15)
    member = hub.join()
    member.store(TEXT)
    found, reserved = member.lookup(TEXT), member.reserve(tokens(2, 64))
    for _ in range(100):
        member.ask(wire.Ping)
        hub.pass_time(10)
    ages = hub.service.stats().gauges
    assert ages["oldest_read_lease_seconds"] == ages["oldest_write_lease_seconds"] == 1000, "a leak shows"
    member.ask(wire.Release, lease=found.lease)
    member.commit(reserved)
    found, reserved = member.lookup(TEXT), member.reserve(tokens(3, 64))
    hub.pass_time(16)
    assert len(hub.state.reads.leases) == len(hub.state.writes.leases) == 0
    member.join()
    for kind, lease in ((wire.Release, found.lease), (wire.Abort, reserved.lease)):
        with pytest.raises(LeaseError, match="must not be used"):
            member.ask(kind, lease=lease)
    hub.state.check_integrity()


def test_a_lookup_that_was_given_up_leaves_no_lease(hub):
    member, other = hub.join(), hub.join("other")
    member.store(TEXT)
    found = member.lookup(TEXT)
    other.ask(wire.Ping, abandoned=(found.lease, 7))
    assert len(hub.state.reads.leases) == 1, "another session's"
    member.ask(wire.Ping, abandoned=(found.lease, 7))
    assert len(hub.state.reads.leases) == 0


def test_a_dead_rank_ends_the_writes_of_its_engine(hub):
    first = hub.join(namespace=namespace(world_size=2))
    dead = hub.join(rank=1, namespace=namespace(world_size=2), process=ELSEWHERE)
    reserved = first.reserve(TEXT)
    dead.view = None  # the kernel removes the mapping
    hub.state.process_died(ELSEWHERE)
    with pytest.raises(LeaseError):
        first.commit(reserved)
    assert first.ask(wire.Ping).revoked == (reserved.lease,)


def test_a_process_is_believed_to_map_the_arena_only_if_it_does(hub):
    member, view = hub.join(maps=False), ArenaView(hub.arena.name)
    with pytest.raises(InvalidInput, match="not this hub's arena"):
        member.ask(wire.Mapped, nonce="another", mapping=view.mapping)
    with pytest.raises(InvalidInput, match="no process holds mapping"):
        member.ask(wire.Mapped, nonce=view.name.nonce, mapping=view.mapping + 1)
    assert member.ask(wire.Mapped, nonce=view.name.nonce, mapping=view.mapping).granted == ()
    with pytest.raises(InvalidInput, match="writes no shard"):
        hub.join("other", rank=-1).ask(wire.Mapped, nonce=view.name.nonce, mapping=view.mapping)
