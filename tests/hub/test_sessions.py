"""Sessions of a hub's service: who joins, who dies, and what becomes of the leases."""

import pytest

from blendhub.client import wire
from blendhub.client.arena_view import ArenaView
from blendhub.core.errors import InvalidInput, LayoutMismatch, LeaseError
from blendhub.core.layout import KVLayout
from blendhub.system.processes import ProcessId
from tests.hub.hub_direct import CHUNK, ELSEWHERE, namespace, tokens


def test_ranks_that_disagree_are_refused_with_the_differing_field(hub):
    hub.join(namespace=namespace(world_size=2))
    wider = KVLayout(layers=2, kv_heads=1, key_dim=8, value_dim=4, dtype="float16", chunk_tokens=CHUNK)
    with pytest.raises(LayoutMismatch, match=r"layout is .*key_dim=4.* there and .*key_dim=8"):
        hub.join(rank=1, namespace=namespace(world_size=2, layout=wider))


def test_a_rank_joins_once_and_within_the_world(hub):
    hub.join(rank=0)
    with pytest.raises(InvalidInput, match="rank 0 of engine 'e' is registered already"):
        hub.join(rank=0)
    with pytest.raises(InvalidInput, match="not below its world size"):
        hub.join(rank=1)


def test_a_lease_ends_once_and_only_for_its_owner(hub):
    member, other, text = hub.join(), hub.join("other"), tokens(1, 64)
    member.store(text)
    found = member.lookup(text)
    with pytest.raises(LeaseError, match="another engine"):
        other.ask(wire.Release, lease=found.lease)
    member.ask(wire.Release, lease=found.lease)
    with pytest.raises(LeaseError, match="does not hold"):
        member.ask(wire.Release, lease=found.lease)
    reserved = member.reserve(tokens(2, 64))
    with pytest.raises(LeaseError, match="another engine"):
        other.commit(reserved)


def test_leases_last_as_long_as_their_session_pings(make_hub):
    hub = make_hub(silence_s=15)
    member, text = hub.join(), tokens(1, 64)
    member.store(text)
    found, reserved = member.lookup(text), member.reserve(tokens(2, 64))
    for _ in range(100):
        hub.now += 10
        member.ask(wire.Ping)
        hub.service.tick()
    ages = hub.service.stats().gauges
    assert ages["oldest_read_lease_seconds"] == ages["oldest_write_lease_seconds"] == 1000, "a leak shows"
    member.ask(wire.Release, lease=found.lease)
    member.commit(reserved)
    found, reserved = member.lookup(text), member.reserve(tokens(3, 64))
    hub.now += 16
    hub.service.tick()
    assert len(hub.state.reads.leases) == len(hub.state.writes.leases) == 0
    member.join()
    for kind, lease in ((wire.Release, found.lease), (wire.Abort, reserved.lease)):
        with pytest.raises(LeaseError, match="must not be used"):
            member.ask(kind, lease=lease)
    hub.state.check_integrity()


def test_a_lookup_that_was_given_up_leaves_no_lease(hub):
    member, other, text = hub.join(), hub.join("other"), tokens(1, 64)
    member.store(text)
    found = member.lookup(text)
    other.ask(wire.Ping, abandoned=(found.lease, 7))
    assert len(hub.state.reads.leases) == 1, "another session's"
    member.ask(wire.Ping, abandoned=(found.lease, 7))
    assert len(hub.state.reads.leases) == 0
    hub.state.check_integrity()


def test_two_lookups_with_one_lease_are_refused(hub):
    member, text = hub.join(), tokens(1, 64)
    member.store(text)
    found = member.lookup(text)
    with pytest.raises(InvalidInput, match="holds already"):
        member.ask(wire.Lookup, [text.tobytes()], lease=found.lease)


def test_a_dead_rank_ends_the_writes_of_its_engine(hub):
    first = hub.join(rank=0, namespace=namespace(world_size=2))
    dead = hub.join(rank=1, namespace=namespace(world_size=2), process=ELSEWHERE)
    reserved = first.reserve(tokens(1, 64))
    dead.die()
    with pytest.raises(LeaseError):
        first.commit(reserved)
    assert first.ask(wire.Ping).revoked == (reserved.lease,)


def test_a_process_that_does_not_run_cannot_register(hub):
    mine = ProcessId.mine()
    with pytest.raises(InvalidInput, match="does not run"):
        hub.join(process=ProcessId(mine.host, 2**22 + 1, 5))


def test_a_process_is_believed_to_map_the_arena_only_if_it_does(hub):
    member = hub.join(maps=False)
    view = ArenaView(hub.arena.name)
    with pytest.raises(InvalidInput, match="not this hub's arena"):
        member.ask(wire.Mapped, nonce="another", mapping=view.mapping)
    with pytest.raises(InvalidInput, match="no process holds mapping"):
        member.ask(wire.Mapped, nonce=view.name.nonce, mapping=view.mapping + 1)
    assert member.ask(wire.Mapped, nonce=view.name.nonce, mapping=view.mapping).granted == ()
    onlooker = hub.join("other", rank=-1)
    with pytest.raises(InvalidInput, match="writes no shard"):
        onlooker.ask(wire.Mapped, nonce=view.name.nonce, mapping=view.mapping)


def test_a_rank_that_has_not_mapped_the_arena_commits_nothing(hub):
    """Its slots hold the bytes of earlier chunks: perhaps KV of another namespace."""
    member = hub.join(maps=False)
    reserved = member.reserve(tokens(1, CHUNK))
    with pytest.raises(InvalidInput, match="has not mapped the arena"):
        member.commit(reserved)
    assert not member.lookup(tokens(1, CHUNK)).matches
