"""What one message, or one session, may cost the hub: bounds that no client widens."""

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from blendhub.client import wire
from blendhub.core.errors import InvalidInput
from blendhub.core.layout import KVLayout, Variant
from blendhub.core.spans import Span
from blendhub.hub.leases import write_leases as writes
from blendhub.hub.limits import MOST_CHUNKS, MOST_SLOTS
from tests.hub.hub_direct import CHUNK, namespace, tokens

TINY = KVLayout(layers=1, kv_heads=1, key_dim=4, value_dim=0, dtype="int8", chunk_tokens=1)


def test_a_lookup_of_many_chunks_takes_a_bounded_lease(make_hub):
    hub = make_hub(n_slots=2000)
    member = hub.join()
    text = tokens(1, 2000 * CHUNK)
    member.store_all(text)
    assert len(member.lookup(np.tile(text, 3)).pieces) == MOST_CHUNKS


def test_a_reservation_of_many_small_chunks_is_answered_with_as_many_as_a_message_may_have(make_hub):
    hub = make_hub(n_slots=2 * MOST_SLOTS * 64 // namespace().slot_bytes)
    member = hub.join(namespace=namespace(layout=TINY))
    text = tokens(1, 400_000)
    reserved = member.reserve(text, Span(10, 400_000))
    assert len(reserved.slots) == MOST_SLOTS and reserved.span == Span(10, 10 + MOST_SLOTS)
    member.commit(reserved)
    again = member.reserve(text, Span(reserved.span.end, 400_000), run=reserved.run)
    assert again.run == reserved.run and again.span.start == reserved.span.end, "the client goes on from there"


def test_a_reservation_evicts_no_more_chunks_than_a_message_may(make_hub, monkeypatch):
    monkeypatch.setattr(writes, "MOST_CHUNKS", MOST_SLOTS)
    small = MOST_SLOTS * 64 // namespace().slot_bytes
    hub = make_hub(n_slots=2 * small)
    member = hub.join(namespace=namespace(layout=TINY))
    text = tokens(1, 2 * MOST_SLOTS)
    for start in (0, MOST_SLOTS):
        member.store(text, Span(start, 2 * MOST_SLOTS))
    assert len(hub.state.cache.policy) == 2 * MOST_SLOTS
    reserved = hub.join("large").reserve(tokens(2, 2 * small * CHUNK))
    assert len(reserved.slots) == small and hub.state.cache.evictions == MOST_SLOTS
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
    found = list(numbers_of(msgspec.inspect.type_info(wire.Request), "", set()))
    assert {"Span.end", "Release.lease", "Register.rank", "ProcessId.pid"} <= {at for at, *_ in found}
    assert [number for number in found if None in number] == []


@pytest.mark.parametrize(
    "salt, why", [("s" * 1025, "has 1,025 characters, and at most 1,024"), ("a\ud800", r"has '\\ud800' at 1")]
)
def test_a_salt_that_no_message_can_hold_is_refused_by_the_client(salt, why):
    with pytest.raises(InvalidInput, match=f"cache_salt {why}"):
        Variant(cache_salt=salt)
