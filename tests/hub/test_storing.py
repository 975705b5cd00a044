"""Requests that store and find KV, sent to a hub's service directly, and what one of them may cost."""

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from blendhub.client import wire
from blendhub.core.errors import ArenaFull, InvalidInput, LeaseError, ProtocolError, StaleEpoch, UnknownSession
from blendhub.core.layout import KVLayout
from blendhub.core.spans import Span
from blendhub.hub.handlers import base
from blendhub.hub.leases import write_leases
from blendhub.hub.limits import MOST_CHUNKS, MOST_SLOTS
from tests.hub.hub_direct import CHUNK, namespace, tokens

TINY = namespace(layout=KVLayout(layers=1, kv_heads=1, key_dim=4, value_dim=0, dtype="int8", chunk_tokens=1))


def test_what_was_stored_is_found_in_pieces_of_chunks_where_it_was_and_elsewhere(hub):
    member, text = hub.join(), tokens(1, 200)
    assert member.lookup(text).lease is None
    reserved = member.store(text[:80])
    assert [slot.span for slot in reserved.slots] == [Span(0, 32), Span(32, 64), Span(64, 80)]
    found = member.lookup(np.concatenate([text[:70], tokens(2, 30)]))
    assert [match.span for match in found.matches if match.exact] == [Span(0, 70)]
    assert [piece.span for piece in found.pieces] == [Span(0, 32), Span(32, 64), Span(64, 70)]
    member.check(found, text)
    member.store(text := tokens(3, 200))
    prompt = np.concatenate([tokens(2, 45), text[40:160]])
    found = member.lookup(prompt)
    assert sum(len(piece.span) for piece in found.pieces) == 120
    assert all(piece.source_start - piece.span.start == 40 - 45 for piece in found.pieces)
    assert not any(match.exact for match in found.matches)
    member.check(found, prompt)
    hub.state.check_integrity()


@pytest.mark.parametrize("skip", [39, 40, 50, 200])
def test_a_prefix_may_be_skipped_that_is_longer_than_what_is_found(hub, skip):
    member, text = hub.join(), tokens(1, 96)
    member.store(text)
    found = member.lookup(np.concatenate([text[:40], tokens(2, 60)]), skip_prefix_n_tokens=skip)
    assert [match.span for match in found.matches] == ([Span(39, 40)] if skip == 39 else [])
    assert hub.service.counters.totals["tokens_exact"] == (1 if skip == 39 else 0)


def test_nothing_is_found_before_every_rank_has_committed(hub):
    wide = namespace(world_size=2)
    first, second = (hub.join(rank=rank, namespace=wide) for rank in range(2))
    text = tokens(1, 64)
    reserved = first.reserve(text)
    for rank in (first, second):
        rank.write(reserved, text)
    first.commit(reserved)
    assert not first.lookup(text).matches
    second.commit(reserved, upto=40)
    assert first.read(text) == 32, "only whole chunks count"
    second.commit(reserved)
    assert first.read(text) == second.read(text) == 64
    assert hub.index.n_tokens == 64, "the index learns the tokens once, not once a rank"


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
    unmapped, text = hub.join("unmapped", maps=False), tokens(2, CHUNK)
    with pytest.raises(InvalidInput, match="has not mapped the arena"):
        unmapped.commit(unmapped.reserve(text))
    assert not member.lookup(text).matches


def test_a_full_arena_says_so_and_goes_on(make_hub):
    member = make_hub(n_slots=2).join()
    reserved = member.reserve(tokens(1, 100))
    assert reserved.span == Span(0, 64), "as much as there is room for"
    with pytest.raises(ArenaFull, match="try again later"):
        member.reserve(tokens(2, 32))
    member.ask(wire.Abort, lease=reserved.lease)
    assert member.reserve(tokens(2, 32)).lease is not None


# What one message may cost.


def test_a_lookup_of_many_chunks_takes_a_bounded_lease(make_hub):
    member, text = make_hub(n_slots=2000).join(), tokens(1, 2000 * CHUNK)
    member.store_all(text)
    assert len(member.lookup(np.tile(text, 3)).pieces) == MOST_CHUNKS


def test_a_reservation_has_as_many_slots_as_a_message_may_and_evicts_no_more_chunks(make_hub, monkeypatch):
    monkeypatch.setattr(write_leases, "MOST_CHUNKS", MOST_SLOTS)
    n_large = MOST_SLOTS * 64 // namespace().slot_bytes
    hub = make_hub(n_slots=2 * n_large)
    member, text = hub.join(namespace=TINY), tokens(1, 2 * MOST_SLOTS)
    first = member.store(text)
    assert first.span == Span(0, MOST_SLOTS) and len(first.slots) == MOST_SLOTS
    rest = member.store(text, Span(MOST_SLOTS, 2 * MOST_SLOTS), run=first.run)
    assert rest.run == first.run, "the client goes on from there"
    assert len(hub.state.cache.policy) == 2 * MOST_SLOTS
    reserved = hub.join("large").reserve(tokens(2, 2 * n_large * CHUNK))
    assert len(reserved.slots) == n_large and hub.state.cache.evictions == MOST_SLOTS
    hub.state.check_integrity()


def numbers_of(kind: Any, at: str, seen: set[type]) -> Iterator[tuple[str, int | None, int | None]]:
    """The places of integers in a type, and their least and greatest values."""
    if isinstance(kind, msgspec.inspect.IntType):
        yield at, kind.ge, kind.le
    elif not isinstance(kind, msgspec.inspect.StructType):
        for name in ("types", "item_types", "item_type"):
            parts = getattr(kind, name, ())
            for part in parts if isinstance(parts, tuple) else [parts]:
                yield from numbers_of(part, at, seen)
    elif kind.cls not in seen:
        seen.add(kind.cls)
        for field in kind.fields:
            yield from numbers_of(field.type, f"{kind.cls.__name__}.{field.name}", seen)


def test_every_number_of_a_request_has_a_least_and_a_greatest_value():
    numbers = list(numbers_of(msgspec.inspect.type_info(wire.Request), "", set()))
    assert {"Span.end", "Release.lease", "Register.rank", "ProcessId.pid"} <= {at for at, *_ in numbers}
    assert [number for number in numbers if None in number] == []


@pytest.mark.parametrize(
    "kind, fields, payload, error, sentence",
    [
        (wire.Lookup, {"epoch": 1}, [b""], StaleEpoch, "an earlier hub"),
        (wire.Lookup, {"session": 1}, [b""], UnknownSession, "register again"),
        (wire.Lookup, {}, [], InvalidInput, "0 payloads"),
        (wire.Lookup, {}, [b"abc"], InvalidInput, "3 bytes"),
        (wire.Lookup, {}, [bytes(8), bytes(8)], InvalidInput, "2 payloads"),
        (wire.Lookup, {}, [bytes(4 * 5001)], InvalidInput, "more than the 5000"),
        (wire.Reserve, {"span": Span(0, 3)}, [bytes(8)], InvalidInput, "within 2 tokens"),
        (wire.Reserve, {"span": Span(1, 1)}, [bytes(8)], InvalidInput, "not empty"),
        (wire.Release, {"lease": 7}, [], LeaseError, "does not hold"),
        (wire.Commit, {"lease": 7, "upto": 1}, [], LeaseError, "does not hold"),
        (wire.Abort, {"lease": 7}, [], LeaseError, "does not hold"),
        (wire.Release, {"lease": -1}, [], ProtocolError, "does not decode"),
        (wire.Lookup, {"wait_s": 1e9}, [b""], ProtocolError, "does not decode"),
        (wire.Lookup, {"wait_s": float("nan")}, [b""], ProtocolError, "wait_s"),
        (wire.Reserve, {"span": Span(0, 2), "blended": True}, [bytes(8)], InvalidInput, "not for both"),
    ],
)
def test_bad_input_is_a_typed_error_and_changes_nothing(hub, monkeypatch, kind, fields, payload, error, sentence):
    monkeypatch.setattr(base, "MOST_PROMPT_TOKENS", 5000)
    member, text = hub.join(), tokens(1, 64)
    member.store(text)
    before = hub.state.cache.arena.extents.free_bytes
    with pytest.raises(error, match=sentence):
        member.ask(kind, payload, **fields)
    hub.state.check_integrity()
    assert hub.state.cache.arena.extents.free_bytes == before
    assert len(hub.state.reads.leases) == len(hub.state.writes.leases) == 0
    assert member.read(text) == 64
