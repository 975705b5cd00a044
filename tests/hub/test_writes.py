"""Reservations and commits of a hub's service, called directly."""

import pytest

from blendhub.client import wire
from blendhub.core.errors import ArenaFull, InvalidInput
from blendhub.core.spans import Span
from tests.hub.hub_direct import namespace, spans_of, tokens


def test_nothing_is_found_before_every_rank_has_committed(hub):
    first, second = (hub.join(rank=rank, namespace=namespace(world_size=2)) for rank in range(2))
    text = tokens(1, 64)
    reserved = first.reserve(text)
    for rank in (first, second):
        rank.write(reserved, text)
    first.commit(reserved)
    assert not first.lookup(text).matches
    second.commit(reserved, upto=40)
    assert spans_of(first.read(text)) == [(0, 32, True)], "only whole chunks count"
    second.commit(reserved)
    for rank in (first, second):
        rank.check(rank.read(text), text)
    index = first.hub.state.indexes.get(namespace(world_size=2).digest)
    assert index.n_tokens == 64, "the index learns the tokens once, not once a rank"
    hub.state.check_integrity()


def test_what_is_stored_exactly_is_not_stored_twice(hub):
    member, text = hub.join(), tokens(1, 128)
    member.store(text, Span(0, 96))
    again = member.reserve(text)
    assert again.span == Span(96, 128)
    member.ask(wire.Abort, lease=again.lease)
    assert not len(member.reserve(text, Span(0, 96)).span)
    assert len(hub.state.writes.leases) == 0


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


def test_a_full_arena_says_so_and_goes_on(make_hub):
    hub = make_hub(n_slots=2)
    member = hub.join()
    held = member.reserve(tokens(1, 100))
    assert held.span == Span(0, 64), "as much as there is room for"
    with pytest.raises(ArenaFull, match="try again later"):
        member.reserve(tokens(2, 32))
    member.ask(wire.Abort, lease=held.lease)
    assert member.reserve(tokens(2, 32)).lease is not None
