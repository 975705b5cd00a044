"""Requests of sessions that store and find KV, sent to a hub's service directly, and what one of them may cost.

That every byte that is read is what was stored for these tokens, namespace and rank, whatever came between, is in
test_machine.py.
"""

import asyncio

import msgspec
import numpy as np
import pytest

from blendhub.client import wire
from blendhub.client.arena_view import ArenaView
from blendhub.core import errors
from blendhub.core.errors import ArenaFull, InvalidInput, LeaseError
from blendhub.core.layout import KVLayout, Variant
from blendhub.core.spans import Span
from blendhub.hub import deletion
from blendhub.hub.handlers import tokens as reading
from blendhub.hub.leases import write_leases
from blendhub.hub.limits import MAX_CHUNKS, MAX_SLOTS
from blendhub.system.processes import ProcessId
from tests.hub.hub_direct import BASE, CHUNK, ELSEWHERE, LAYOUT, namespace, tokens

TEXT = tokens(1, 64)
WIDE = namespace(world_size=2)
ANN, BOB = Variant(cache_salt="ann"), Variant(cache_salt="bob")


def test_what_was_stored_is_found_in_pieces_of_chunks_where_it_was_and_elsewhere(hub):
    member, text = hub.join(), tokens(1, 200)
    assert member.lookup(text).lease is None
    reserved = member.store(text[:80])
    assert [slot.span for slot in reserved.slots] == [Span(0, 32), Span(32, 64), Span(64, 80)]
    prompt = np.concatenate([text[:70], tokens(2, 30)])
    found = member.lookup(prompt)
    assert [match.span for match in found.matches if match.exact] == [Span(0, 70)]
    assert [piece.span for piece in found.pieces] == [Span(0, 32), Span(32, 64), Span(64, 70)]
    member.check(found, text)
    for skip, spans in ((69, [Span(69, 70)]), (70, []), (90, [])):
        assert [match.span for match in member.lookup(prompt, skip_prefix_n_tokens=skip).matches] == spans
    assert hub.service.counters.totals["tokens_exact"] == 71
    member.store(text := tokens(3, 200))
    prompt = np.concatenate([tokens(2, 45), text[40:160]])
    found = member.lookup(prompt)
    assert sum(len(piece.span) for piece in found.pieces) == 120
    assert all(piece.source_start - piece.span.start == 40 - 45 for piece in found.pieces)
    assert not any(match.exact for match in found.matches)
    member.check(found, prompt)


def test_what_is_stored_exactly_is_not_stored_twice(hub):
    member, text = hub.join(), tokens(1, 128)
    member.store(text, Span(0, 96))
    again = member.reserve(text)
    assert again.span == Span(96, 128)
    member.ask(wire.Abort, lease=again.lease)
    assert not len(member.reserve(text, Span(0, 96)).span)


def test_commits_go_forward_and_stay_inside_and_come_from_those_who_write(hub):
    member = hub.join()
    reserved = member.reserve(tokens(1, 96))
    member.commit(reserved, upto=64)
    for upto in (32, 97):
        with pytest.raises(InvalidInput, match="has committed up to 64"):
            member.commit(reserved, upto=upto)
    with pytest.raises(InvalidInput, match="no shard"):
        hub.join(rank=-1).commit(reserved)
    # Its slots hold the bytes of earlier chunks: perhaps KV of another namespace.
    unmapped, text, view = hub.join("unmapped", maps=False), tokens(2, CHUNK), ArenaView(hub.arena.name)
    with pytest.raises(InvalidInput, match="has not mapped the arena"):
        unmapped.commit(unmapped.reserve(text))
    with pytest.raises(InvalidInput, match="not this hub's arena"):
        unmapped.ask(wire.Mapped, nonce="another", mapping=view.mapping)
    with pytest.raises(InvalidInput, match="no process holds mapping"):
        unmapped.ask(wire.Mapped, nonce=view.name.nonce, mapping=view.mapping + 1)
    with pytest.raises(InvalidInput, match="writes no shard"):
        hub.join("scheduler", rank=-1).ask(wire.Mapped, nonce=view.name.nonce, mapping=view.mapping)
    assert not unmapped.lookup(text).matches


def test_clear_drops_one_namespace_or_all_of_the_engine_and_what_stores_nothing_takes_no_memory(hub):
    member, stranger = hub.join(), hub.join("b", namespace=namespace("another"))
    for variant in (BASE, ANN, BOB):
        member.store(TEXT, variant=variant)
        stranger.store(TEXT, variant=variant)

    def left(of):
        return [variant for variant in (BASE, ANN, BOB) if of.read(TEXT, variant)]

    for salt in ("never used", "ann"):
        member.lookup(TEXT, variant=Variant(cache_salt=salt), acquire=False)
        member.ask(wire.Clear, variant=Variant(cache_salt=salt))
    assert left(member) == [BASE, BOB]
    member.ask(wire.Clear)
    assert left(member) == [] and left(stranger) == [BASE, ANN, BOB]
    stranger.ask(wire.Clear)
    hub.service.tick()
    assert not len(hub.state.indexes) and hub.service.stats().namespaces == {}


def test_what_another_engine_stores_while_a_namespace_is_cleared_stays(hub, monkeypatch):
    monkeypatch.setattr(deletion, "AT_ONCE", 1)
    member, writer, text = hub.join(), hub.join("b"), tokens(2, 96)
    member.store(TEXT)

    async def clear_and_store() -> None:
        clearing = asyncio.ensure_future(hub.answer(wire.Clear(**member.ids)))
        await asyncio.sleep(0)
        reserve = wire.Reserve(**writer.ids, span=Span(0, 96))
        reserved = (await hub.answer(reserve, [text.tobytes()])).message
        writer.write(reserved, text)
        await hub.answer(wire.Commit(**writer.ids, lease=reserved.lease, upto=96))
        assert not clearing.done()
        await clearing

    hub.run(clear_and_store())
    assert member.read(TEXT) == 0 and member.read(text) == 96


# Sessions.


def test_who_cannot_be_part_of_an_engine_is_refused(hub):
    hub.join(namespace=WIDE)
    wider = msgspec.structs.replace(LAYOUT, key_dim=8)
    with pytest.raises(errors.LayoutMismatch, match=r"layout is .*key_dim=4.* there and .*key_dim=8"):
        hub.join(rank=1, namespace=namespace(world_size=2, layout=wider))
    gone = ProcessId(ProcessId.mine().host, 2**22 + 1, 5)
    for other, why in (
        ({"namespace": WIDE}, "rank 0 of engine 'e' is registered already"),
        ({"namespace": WIDE, "rank": 2}, "not below its world size"),
        ({"engine": "another", "process": gone}, "does not run"),
        ({"engine": "another", "namespace": namespace(cache_salt="x")}, "each of its requests names its own"),
    ):
        with pytest.raises(InvalidInput, match=why):
            hub.join(**other)


def test_a_lease_ends_once_and_only_for_its_owner(hub):
    member, other = hub.join(), hub.join("other")
    member.store(TEXT)
    found = member.lookup(TEXT)
    with pytest.raises(InvalidInput, match="holds already"):
        member.ask(wire.Lookup, [TEXT.tobytes()], lease=found.lease)
    with pytest.raises(LeaseError, match="another engine"):
        other.ask(wire.Release, lease=found.lease)
    with pytest.raises(LeaseError, match="another engine"):
        other.commit(member.reserve(tokens(2, 64)))
    other.ask(wire.Ping, abandoned=(found.lease, 7))
    member.ask(wire.Release, lease=found.lease)
    with pytest.raises(LeaseError, match="does not hold"):
        member.ask(wire.Release, lease=found.lease)
    found = member.lookup(TEXT)
    member.ask(wire.Ping, abandoned=(found.lease, 7))
    assert len(hub.state.reads.leases) == 0, "the lookup was given up"
    reserved = member.reserve(tokens(3, 64))
    other.ask(wire.Ping, abandoned=(reserved.lease,))
    member.commit(reserved, upto=CHUNK)
    member.ask(wire.Ping, abandoned=(reserved.lease,))
    with pytest.raises(LeaseError, match="does not hold"):
        member.commit(reserved)
    hub.restart()
    assert abs(hub.join().reserve(TEXT).lease - reserved.lease) > 99, "what is said of one lease concerns another"


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
    member.commit(reserved)
    reserved = member.reserve(tokens(3, 64))
    hub.pass_time(16)
    assert len(hub.state.reads.leases) == len(hub.state.writes.leases) == 0
    member.join()
    for kind, lease in ((wire.Release, found.lease), (wire.Abort, reserved.lease)):
        with pytest.raises(LeaseError, match="must not be used"):
            member.ask(kind, lease=lease)


def test_a_dead_rank_ends_the_writes_of_its_engine(hub):
    first = hub.join(namespace=WIDE)
    dead = hub.join(rank=1, namespace=WIDE, process=ELSEWHERE)
    reserved = first.reserve(TEXT)
    dead.view = None  # the kernel removes the mapping
    hub.state.process_died(ELSEWHERE)
    with pytest.raises(LeaseError):
        first.commit(reserved)
    assert first.ask(wire.Ping).revoked == (reserved.lease,)


# What one message may cost.


def test_a_full_arena_says_so_and_goes_on(make_hub):
    member = make_hub(n_slots=2).join()
    reserved = member.reserve(tokens(1, 100))
    assert reserved.span == Span(0, 64), "as much as there is room for"
    with pytest.raises(ArenaFull, match="try again later"):
        member.reserve(tokens(2, 32))
    member.ask(wire.Abort, lease=reserved.lease)
    assert member.reserve(tokens(2, 32)).lease is not None


def test_a_lookup_of_many_chunks_takes_a_bounded_lease(make_hub):
    member, text = make_hub(n_slots=2000).join(), tokens(1, 2000 * CHUNK)
    member.store_all(text)
    assert len(member.lookup(np.tile(text, 3)).pieces) == MAX_CHUNKS


def test_a_reservation_has_as_many_slots_as_a_message_may_and_evicts_no_more_chunks(make_hub, monkeypatch):
    monkeypatch.setattr(write_leases, "MAX_CHUNKS", MAX_SLOTS)
    n_large = MAX_SLOTS * 64 // namespace().slot_bytes
    hub = make_hub(n_slots=2 * n_large)
    tiny = KVLayout(layers=1, kv_heads=1, key_dim=4, value_dim=0, dtype="int8", chunk_tokens=1)
    member, text = hub.join(namespace=namespace(layout=tiny)), tokens(1, 2 * MAX_SLOTS)
    first = member.store(text)
    assert first.span == Span(0, MAX_SLOTS) and len(first.slots) == MAX_SLOTS
    rest = member.store(text, Span(MAX_SLOTS, 2 * MAX_SLOTS), run=first.run)
    assert rest.run == first.run, "the client goes on from there"
    reserved = hub.join("large").reserve(tokens(2, 2 * n_large * CHUNK))
    assert len(reserved.slots) == n_large and hub.state.cache.evictions == MAX_SLOTS


@pytest.mark.parametrize(
    "kind, fields, payload, error, sentence",
    [
        (wire.Lookup, {"epoch": 1}, [b""], errors.StaleEpoch, "an earlier hub"),
        (wire.Lookup, {"session": 1}, [b""], errors.UnknownSession, "register again"),
        (wire.Lookup, {}, [b"abc"], InvalidInput, "3 bytes"),
        (wire.Lookup, {}, [bytes(4 * 5001)], InvalidInput, "more than the 5000"),
        (wire.Reserve, {"span": Span(0, 3)}, [bytes(8)], InvalidInput, "within 2 tokens"),
        (wire.Reserve, {"span": Span(1, 1)}, [bytes(8)], InvalidInput, "not empty"),
        (wire.Lookup, {"wait_s": float("nan")}, [b""], errors.ProtocolError, "wait_s"),
    ],
)
def test_bad_input_is_a_typed_error_and_changes_nothing(hub, monkeypatch, kind, fields, payload, error, sentence):
    monkeypatch.setattr(reading, "MAX_PROMPT_TOKENS", 5000)
    member = hub.join()
    member.store(TEXT)
    before = hub.state.cache.arena.extents.free_bytes
    with pytest.raises(error, match=sentence):
        member.ask(kind, payload, **fields)
    assert hub.state.cache.arena.extents.free_bytes == before
    assert len(hub.state.reads.leases) == len(hub.state.writes.leases) == 0
    assert member.read(TEXT) == 64
