"""Lookups, acquires and clears of a hub's service, called directly."""

import threading

import numpy as np
import pytest
from hub_direct import namespace, spans_of, tokens

from blendhub.client import wire
from blendhub.core.errors import InvalidInput
from blendhub.core.spans import Span


def test_what_was_stored_is_found_exactly_in_pieces_of_chunks(hub):
    member, text = hub.join(), tokens(1, 80)
    assert member.lookup(text).lease is None
    reserved = member.store(text)
    assert [slot.span for slot in reserved.slots] == [Span(0, 32), Span(32, 64), Span(64, 80)]
    found = member.read(np.concatenate([text[:70], tokens(2, 30)]))
    assert spans_of(found) == [(0, 32, True), (32, 64, True), (64, 70, True)]
    member.check(found, text)
    hub.state.check_integrity()


def test_moved_text_is_found_with_its_old_positions(hub):
    member, text = hub.join(), tokens(1, 200)
    member.store(text)
    prompt = np.concatenate([tokens(2, 45), text[40:160]])
    found = member.read(prompt)
    assert sum(len(piece.span) for piece in found.pieces) == 120
    assert all(piece.source_start - piece.span.start == 40 - 45 for piece in found.pieces)
    assert not any(match.exact for match in found.matches)
    member.check(found, prompt)


def test_a_skipped_prefix_is_not_leased(hub):
    member, text = hub.join(), tokens(1, 96)
    member.store(text)
    found = member.lookup(text, skip_prefix_n_tokens=50)
    assert [match.span for match in found.matches] == [Span(50, 96)]
    acquired = member.ask(wire.Lookup, matches=found.matches)
    assert spans_of(acquired) == [(50, 64, True), (64, 96, True)]
    assert member.lookup(text, skip_prefix_n_tokens=96).lease is None


@pytest.mark.parametrize("skip", [39, 40, 50, 200])
def test_a_prefix_may_be_skipped_that_is_longer_than_what_is_found(hub, skip):
    member, text = hub.join(), tokens(1, 96)
    member.store(text)
    found = member.lookup(np.concatenate([text[:40], tokens(2, 60)]), skip_prefix_n_tokens=skip)
    assert [match.span for match in found.matches] == ([Span(39, 40)] if skip == 39 else [])
    assert hub.service.counters.totals["tokens_exact"] == (1 if skip == 39 else 0)


def test_what_is_read_is_not_evicted(make_hub):
    hub = make_hub(n_slots=4)
    member, text = hub.join(), tokens(1, 64)
    member.store(text)
    found = member.lookup(text)
    acquired = member.ask(wire.Lookup, matches=found.matches)
    member.ask(wire.Release, lease=found.lease)
    for seed in range(2, 6):
        member.store(tokens(seed, 64))
    member.check(acquired, text)
    member.ask(wire.Release, lease=acquired.lease)
    member.store(tokens(6, 4 * 32))
    assert not member.lookup(text).matches, "an evicted chunk is matched"
    hub.state.check_integrity()


def test_acquire_takes_what_an_earlier_lookup_named(hub):
    member, text = hub.join(), tokens(1, 96)
    member.store(text)
    found = member.lookup(text, acquire=False)
    assert found.lease is None
    taken = member.ask(wire.Lookup, matches=found.matches, skip_prefix_n_tokens=32)
    assert spans_of(taken) == [(32, 64, True), (64, 96, True)]
    member.check(taken, text)
    with pytest.raises(InvalidInput, match="start at 96 or later"):
        member.ask(wire.Lookup, matches=found.matches * 2)


def test_long_prompts_are_matched_in_a_thread(make_hub, monkeypatch):
    hub = make_hub(inline=10)
    member, text = hub.join(), tokens(1, 64)
    member.store(text)
    index = hub.state.indexes.get(namespace().digest)
    threads, match = [], index.match

    def watched(*given):
        threads.append(threading.current_thread())
        return match(*given)

    monkeypatch.setattr(index, "match", watched)
    member.check(member.read(text), text)
    assert threads and threading.current_thread() not in threads
    hub.state.check_integrity()


def test_clear_forgets_all_but_what_is_leased(hub):
    member, text, other = hub.join(), tokens(1, 64), tokens(2, 64)
    member.store(text)
    member.store(other)
    found = member.read(text)
    member.ask(wire.Clear)
    assert not member.lookup(other, acquire=False).matches
    member.check(found, text)
    member.ask(wire.Release, lease=found.lease)
    member.ask(wire.Clear)
    assert hub.service.stats().gauges["chunks"] == 0
    assert hub.state.cache.arena.extents.free_bytes == hub.arena.name.size
    hub.state.check_integrity()
