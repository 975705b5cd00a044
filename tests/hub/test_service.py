"""The answers of a hub's service, called directly."""

import asyncio
import threading

import numpy as np
import pytest
from hub_direct import CHUNK, LAYOUT, marks, namespace, tokens

from blendhub import wire
from blendhub.arena_view import ArenaView
from blendhub.contracts import Envelope
from blendhub.errors import (
    ArenaFull,
    InvalidInput,
    LayoutMismatch,
    LeaseError,
    ProtocolError,
    StaleEpoch,
    UnknownSession,
)
from blendhub.layout import KVLayout
from blendhub.plan import Span
from blendhub.processes import ProcessId

ELSEWHERE = ProcessId("another machine", 1, 1)


def found_spans(found):
    return [(piece.span.start, piece.span.end, piece.exact) for piece in found.pieces]


def test_what_was_stored_is_found_exactly_in_pieces_of_chunks(hub):
    member, text = hub.join(), tokens(1, 80)
    assert member.lookup(text).lease is None
    reserved = member.store(text)
    assert [slot.span for slot in reserved.slots] == [Span(0, 32), Span(32, 64), Span(64, 80)]
    found = member.lookup(np.concatenate([text[:70], tokens(2, 30)]))
    assert found_spans(found) == [(0, 32, True), (32, 64, True), (64, 70, True)]
    member.check(found, text)
    hub.state.check_integrity()


def test_the_hit_rate_is_of_lookups_alone(hub):
    member, text = hub.join(), tokens(1, 96)
    member.store(text)
    found = member.lookup(text, acquire=False)
    member.lookup(tokens(2, 96))
    member.ask(wire.Acquire, matches=found.matches)
    member.ask(wire.Prefetch, [text.tobytes()])
    counters = hub.ask(wire.Stats()).counters
    assert counters["requests_lookup"] == 2 and counters["lookups_that_found"] == 1


def test_moved_text_is_found_with_its_old_positions(hub):
    member, text = hub.join(), tokens(1, 200)
    member.store(text)
    prompt = np.concatenate([tokens(2, 45), text[40:160]])
    found = member.lookup(prompt)
    assert sum(len(piece.span) for piece in found.pieces) == 120
    assert all(piece.source_start - piece.span.start == 40 - 45 and not piece.exact for piece in found.pieces)
    member.check(found, prompt)


def test_a_skipped_prefix_is_not_leased(hub):
    member, text = hub.join(), tokens(1, 96)
    member.store(text)
    assert found_spans(member.lookup(text, skip_prefix_n_tokens=50)) == [(50, 64, True), (64, 96, True)]
    assert member.lookup(text, skip_prefix_n_tokens=96).lease is None


@pytest.mark.parametrize("skip", [39, 40, 50, 200])
def test_a_prefix_may_be_skipped_that_is_longer_than_what_is_found(hub, skip):
    member, text = hub.join(), tokens(1, 96)
    member.store(text)
    found = member.lookup(np.concatenate([text[:40], tokens(2, 60)]), skip_prefix_n_tokens=skip)
    assert found_spans(found) == ([(39, 40, True)] if skip == 39 else [])
    assert hub.service.counters.totals["tokens_exact"] == (1 if skip == 39 else 0)


def test_nothing_is_found_before_every_rank_has_committed(hub):
    first, second = (hub.join(rank=rank, namespace=namespace(world_size=2)) for rank in range(2))
    text = tokens(1, 64)
    reserved = first.reserve(text)
    for rank in (first, second):
        rank.write(reserved, text)
    first.commit(reserved)
    assert not first.lookup(text).matches
    second.commit(reserved, upto=40)
    assert found_spans(first.lookup(text)) == [(0, 32, True)], "only whole chunks count"
    second.commit(reserved)
    for rank in (first, second):
        rank.check(rank.lookup(text), text)
    index = first.hub.state.indexes[namespace(world_size=2).digest]
    assert len(index) == 64, "the index learns the tokens once, not once a rank"
    hub.state.check_integrity()


def test_a_run_grows(hub):
    member, text = hub.join(), tokens(1, 300)
    first = member.store(text, Span(0, 100))
    second = member.store(text, Span(100, 300), run=first.run)
    assert second.run == first.run
    prompt = np.concatenate([tokens(9, 7), text[60:200]])
    assert {match.run for match in member.lookup(prompt).matches} == {first.run}


def test_a_run_does_not_grow_by_another_texts_tokens(hub):
    member, text, other = hub.join(), tokens(1, 96), tokens(2, 96)
    first = member.store(text, Span(0, 64))
    second = member.store(other, Span(64, 96), run=first.run)
    assert second.run != first.run
    hub.state.check_integrity()
    member.check(member.lookup(text), text)
    assert found_spans(member.lookup(text)) == [(0, 32, True), (32, 64, True)]


def test_what_is_stored_exactly_is_not_stored_twice(hub):
    member, text = hub.join(), tokens(1, 128)
    member.store(text, Span(0, 96))
    again = member.reserve(text)
    assert again.span == Span(96, 128)
    member.ask(wire.Abort, lease=again.lease)
    assert not len(member.reserve(text, Span(0, 96)).span)
    assert len(hub.state.writes.leases) == 0


def test_namespaces_share_nothing(hub):
    one, other = hub.join("a"), hub.join("b", namespace=namespace("another"))
    text = tokens(1, 64)
    one.store(text)
    assert not other.lookup(text).matches
    assert not hub.join("c", namespace=namespace(cache_salt="pepper")).lookup(text).matches


def test_an_engine_whose_ranks_disagree_is_told_in_what(hub):
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


@pytest.mark.parametrize(
    "kind, fields, payload, error, sentence",
    [
        (wire.Lookup, {"epoch": 1}, [b""], StaleEpoch, "an earlier hub"),
        (wire.Lookup, {"session": 1}, [b""], UnknownSession, "register again"),
        (wire.Lookup, {}, [], InvalidInput, "0 payloads"),
        (wire.Lookup, {}, [b"abc"], InvalidInput, "3 bytes"),
        (wire.Lookup, {}, [bytes(8), bytes(8)], InvalidInput, "2 payloads"),
        (wire.Lookup, {}, [bytes(4 * 5001)], InvalidInput, "max_prompt_tokens"),
        (wire.Reserve, {"span": Span(0, 3)}, [bytes(8)], InvalidInput, "within 2 tokens"),
        (wire.Reserve, {"span": Span(1, 1)}, [bytes(8)], InvalidInput, "not empty"),
        (wire.Release, {"lease": 7}, [], LeaseError, "does not hold"),
        (wire.Commit, {"lease": 7, "upto": 1}, [], LeaseError, "does not hold"),
        (wire.Abort, {"lease": 7}, [], LeaseError, "does not hold"),
        (wire.Fetch, {"lease": 7}, [], LeaseError, "does not hold"),
        (wire.Put, {"lease": 7, "position": 0}, [], LeaseError, "does not hold"),
        (wire.Release, {"lease": -1}, [], ProtocolError, "does not decode"),
        (wire.Lookup, {"wait_s": 1e9}, [b""], ProtocolError, "does not decode"),
    ],
)
def test_bad_input_is_a_typed_error_and_changes_nothing(make_hub, kind, fields, payload, error, sentence):
    hub = make_hub(max_prompt_tokens=5000)
    member, text = hub.join(), tokens(1, 64)
    member.store(text)
    before = hub.service.numbers().gauges["arena_free_bytes"]
    with pytest.raises(error, match=sentence):
        member.ask(kind, payload, **fields)
    hub.state.check_integrity()
    assert hub.service.numbers().gauges["arena_free_bytes"] == before
    assert len(hub.state.reads.leases) == len(hub.state.writes.leases) == 0
    member.check(member.lookup(text), text)


def test_a_lease_ends_once_and_only_for_its_owner(hub):
    member, other, text = hub.join(), hub.join("other"), tokens(1, 64)
    member.store(text)
    found = member.lookup(text)
    with pytest.raises(LeaseError, match="another session"):
        other.ask(wire.Release, lease=found.lease)
    member.ask(wire.Release, lease=found.lease)
    with pytest.raises(LeaseError, match="does not hold"):
        member.ask(wire.Release, lease=found.lease)
    reserved = member.reserve(tokens(2, 64))
    with pytest.raises(LeaseError, match="another engine"):
        other.commit(reserved)


def test_commits_go_forward_and_stay_inside(hub):
    member = hub.join()
    reserved = member.reserve(tokens(1, 96))
    member.commit(reserved, upto=64)
    for upto in (32, 97):
        with pytest.raises(InvalidInput, match="has committed up to 64"):
            member.commit(reserved, upto=upto)
    onlooker = hub.join(rank=-1)
    with pytest.raises(InvalidInput, match="no shard"):
        onlooker.commit(reserved)


def test_what_is_read_is_not_evicted(make_hub):
    hub = make_hub(n_slots=4)
    member, text = hub.join(), tokens(1, 64)
    member.store(text)
    found = member.lookup(text)
    for seed in range(2, 6):
        member.store(tokens(seed, 64))
    member.check(found, text)
    member.ask(wire.Release, lease=found.lease)
    for seed in range(6, 9):
        member.store(tokens(seed, 64))
    assert not member.lookup(text).matches, "what is evicted is not matched"
    hub.state.check_integrity()


def test_a_full_arena_says_so_and_goes_on(make_hub):
    hub = make_hub(n_slots=2)
    member = hub.join()
    held = member.reserve(tokens(1, 100))
    assert held.span == Span(0, 64), "as much as there is room for"
    with pytest.raises(ArenaFull, match="try again later"):
        member.reserve(tokens(2, 32))
    member.ask(wire.Abort, lease=held.lease)
    assert member.reserve(tokens(2, 32)).lease is not None


def test_a_chunk_larger_than_the_arena_is_refused_with_the_sizes(make_hub):
    hub = make_hub(n_slots=1)
    member = hub.join(namespace=namespace(world_size=2))
    with pytest.raises(ArenaFull, match="arena_gib"):
        member.reserve(tokens(1, 32))


def test_expired_leases_end(make_hub):
    hub = make_hub(read_lease_s=10, write_lease_s=10, silence_s=1000)
    member, text = hub.join(), tokens(1, 64)
    member.store(text)
    found, reserved = member.lookup(text), member.reserve(tokens(2, 64))
    hub.now += 11
    hub.service.tick()
    for kind, lease in ((wire.Release, found.lease), (wire.Abort, reserved.lease)):
        with pytest.raises(LeaseError, match="must not be used"):
            member.ask(kind, lease=lease)
    hub.state.check_integrity()


def test_slots_of_a_revoked_write_wait_for_their_writer(make_hub):
    hub = make_hub(n_slots=2, write_lease_s=10, silence_s=1000)
    member, other = hub.join(), hub.join("other")
    reserved = member.reserve(tokens(1, 64))
    hub.now += 11
    hub.service.tick()
    with pytest.raises(ArenaFull):
        other.reserve(tokens(2, 32))
    assert member.ask(wire.Ping).revoked == (reserved.lease,)
    hub.state.check_integrity()
    assert member.ask(wire.Ping, let_go=(reserved.lease,)).revoked == ()
    assert other.reserve(tokens(2, 64)).span == Span(0, 64)
    hub.state.check_integrity()


def test_a_silent_session_keeps_only_the_slots_it_may_still_write(make_hub):
    hub = make_hub(n_slots=2, silence_s=5)
    member = hub.join()
    member.reserve(tokens(1, 64))
    hub.now += 6
    hub.service.tick()
    with pytest.raises(UnknownSession):
        member.ask(wire.Ping)
    hub.state.check_integrity()
    late = hub.join("other")
    with pytest.raises(ArenaFull):
        late.reserve(tokens(2, 32))
    member.join()
    assert late.reserve(tokens(2, 64)).span == Span(0, 64)
    hub.state.check_integrity()


def test_a_dead_process_holds_nothing(make_hub):
    hub = make_hub(n_slots=4)
    survivor, text = hub.join("other", rank=-1), tokens(1, 64)
    dead = hub.join(process=ELSEWHERE)
    dead.store(text)
    dead.lookup(text)
    dead.reserve(tokens(2, 64))
    dead.die()
    hub.state.check_integrity()
    assert len(hub.state.reads.leases) == len(hub.state.writes.leases) == len(hub.state.writes.quarantined) == 0
    assert survivor.lookup(text).matches, "what was published stays"
    assert not survivor.lookup(tokens(2, 64)).matches, "what was not finished never appears"


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


def test_bytes_through_the_transport(hub):
    """What a client on another machine does."""
    member, text = hub.join(process=ELSEWHERE, maps=False), tokens(1, 64)
    reserved = member.reserve(text)
    for slot in reserved.slots:
        shard = bytearray(LAYOUT.shard_bytes)
        shard[: len(slot.span) * 4] = marks(text, slot.span, 0).tobytes()
        member.ask(wire.Put, [shard], lease=reserved.lease, position=slot.span.start)
    member.commit(reserved)
    found = member.lookup(text)
    member.check(found, text)
    ids = {"session": member.registered.session, "epoch": member.registered.epoch}
    shards = hub.envelope(wire.Fetch(**ids, lease=found.lease)).payload
    assert [bytes(shard) for shard in shards] == [member.shard(piece.slot).tobytes() for piece in found.pieces]
    del shards
    reserved = member.reserve(tokens(2, 32))
    with pytest.raises(InvalidInput, match="the payloads have"):
        member.ask(wire.Put, [b"short"], lease=reserved.lease, position=0)
    with pytest.raises(InvalidInput, match="no slot"):
        member.ask(wire.Put, [b""], lease=reserved.lease, position=1)


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
        found = member.lookup(text)
        assert found_spans(found)[-1] == (64, 96, True)
        member.check(found, text)
    onlooker = hub.join(rank=-1, namespace=two_ranks)
    second = onlooker.reserve(tokens(2, 32))
    with pytest.raises(InvalidInput, match="no shard"):
        onlooker.ask(wire.Put, [garbage], lease=second.lease, position=0)


def test_a_commit_waits_for_the_puts_before_it(hub, monkeypatch):
    """A client need not wait for an answer before it sends the next request."""
    member, text = hub.join(process=ELSEWHERE, maps=False), tokens(1, 32)
    reserved = member.reserve(text)
    ids = {"session": member.registered.session, "epoch": member.registered.epoch}
    begun, go_on = threading.Event(), threading.Event()
    copy = np.copyto

    def slowly(*arrays):
        begun.set()
        go_on.wait(10)
        copy(*arrays)

    async def put_and_commit():
        put = wire.Put(**ids, lease=reserved.lease, position=0)
        putting = asyncio.ensure_future(hub.service.handle(b"peer", Envelope(put, [shard_of(text, reserved.slots[0])])))
        await asyncio.to_thread(begun.wait, 10)
        commit = wire.Commit(**ids, lease=reserved.lease, upto=32)
        committing = asyncio.ensure_future(hub.service.handle(b"peer", Envelope(commit)))
        await asyncio.sleep(0.05)
        assert not committing.done() and not hub.state.cache.policy, "what is not copied yet can be read"
        go_on.set()
        await asyncio.gather(putting, committing)

    monkeypatch.setattr(np, "copyto", slowly)
    hub.run(put_and_commit())
    monkeypatch.undo()
    found = member.lookup(text)
    assert found_spans(found) == [(0, 32, True)]
    member.check(found, text)


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


def test_clear_forgets_all_but_what_is_leased(hub):
    member, text, other = hub.join(), tokens(1, 64), tokens(2, 64)
    member.store(text)
    member.store(other)
    found = member.lookup(text)
    member.ask(wire.Clear)
    assert not member.lookup(other, acquire=False).matches
    member.check(found, text)
    member.ask(wire.Release, lease=found.lease)
    member.ask(wire.Clear)
    assert hub.service.numbers().gauges["chunks"] == 0
    assert hub.state.cache.arena.extents.free_bytes == hub.arena.name.size
    hub.state.check_integrity()


def test_acquire_takes_what_an_earlier_lookup_named(hub):
    member, text = hub.join(), tokens(1, 96)
    member.store(text)
    found = member.lookup(text, acquire=False)
    assert found.lease is None
    taken = member.ask(wire.Acquire, matches=found.matches, skip_prefix_n_tokens=32)
    assert found_spans(taken) == [(32, 64, True), (64, 96, True)]
    member.check(taken, text)
    with pytest.raises(InvalidInput, match="start at 96 or later"):
        member.ask(wire.Acquire, matches=found.matches * 2)


def test_long_prompts_are_matched_in_a_thread(make_hub, monkeypatch):
    hub = make_hub(match_inline_tokens=10)
    member, text = hub.join(), tokens(1, 64)
    member.store(text)
    index = hub.state.indexes[namespace().digest]
    threads, match = [], index.match

    def watched(tokens):
        threads.append(threading.current_thread())
        return match(tokens)

    monkeypatch.setattr(index, "match", watched)
    member.check(member.lookup(text), text)
    assert threads and threading.current_thread() not in threads
    hub.state.check_integrity()


def test_an_unused_namespace_is_forgotten(hub):
    member, text = hub.join(), tokens(1, 64)
    reserved = member.store(text)
    hub.service.tick()
    assert len(hub.state.indexes) == 1 and reserved.run
    member.ask(wire.Unregister)
    hub.service.tick()
    assert len(hub.state.indexes) == 1, "something is stored there"
    member.join()
    member.ask(wire.Clear)
    hub.service.tick()
    assert len(hub.state.indexes) == 1, "an engine stores there"
    member.ask(wire.Unregister)
    hub.service.tick()
    assert not hub.state.indexes
    member.join()
    member.store(text)
    member.check(member.lookup(text), text)


def test_slots_of_different_sizes_make_room_for_each_other(make_hub):
    hub = make_hub(n_slots=7)
    small, large = hub.join("small"), hub.join("large", namespace=namespace("large", world_size=3))
    others = [hub.join("large", rank, namespace("large", world_size=3)) for rank in (1, 2)]
    for seed in range(30):
        if seed % 3:
            small.store(tokens(seed, 32))
        else:
            reserved = large.reserve(tokens(seed, 32))
            for member in (large, *others):
                member.write(reserved, tokens(seed, 32))
                member.commit(reserved)
        hub.state.check_integrity()
