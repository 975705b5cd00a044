"""The store behind the arena: evicted chunks come back, also after a restart; damaged chunks do not."""

import asyncio
import time

import msgspec
import pytest

from blendhub.client import wire
from blendhub.core.errors import StoreFailed
from blendhub.core.spans import Span
from tests.hub.hub_direct import CHUNK, namespace, tokens

TEXTS = [tokens(seed, 2 * CHUNK) for seed in range(8)]


@pytest.fixture
def small_hub(make_hub, tmp_path):
    """A hub with memory for four chunks, and disk space for many."""
    return make_hub(n_slots=4, store=tmp_path / "store")


def fill(hub, member, texts=TEXTS):
    for text in texts:
        member.store(text)
        hub.settle()  # a full arena grants less than was asked while it waits for the store


def test_evicted_chunks_come_back_from_the_store(small_hub):
    member = small_hub.join()
    fill(small_hub, member)
    for text in TEXTS:
        found = member.read(text, wait_s=5.0)
        assert sum(len(piece.span) for piece in found.pieces) == len(text)
        member.check(found, text)
        member.ask(wire.Release, lease=found.lease)
        small_hub.state.check_integrity()
    assert small_hub.tier.reader.loaded > 0


def test_without_waiting_the_reply_says_what_is_on_the_way(small_hub):
    member = small_hub.join()
    fill(small_hub, member)
    found = member.lookup(TEXTS[0])
    assert found.on_the_way_tokens == len(TEXTS[0]) and found.lease is None and not found.matches
    small_hub.settle()
    assert len(member.read(TEXTS[0]).pieces) == 2


def test_a_chunk_that_arrives_while_a_lookup_that_waits_for_it_is_answered_is_loaded_once(small_hub):
    member = small_hub.join()
    fill(small_hub, member)
    small_hub.settle()
    loaded = small_hub.tier.reader.loaded
    assert member.lookup(TEXTS[0]).on_the_way
    small_hub.run(asyncio.sleep(0))  # the threads read, and the loop does not hear of it
    time.sleep(0.1)
    found = member.read(TEXTS[0], wait_s=5.0)
    assert len(found.pieces) == 2
    member.check(found, TEXTS[0])
    small_hub.state.check_integrity()
    assert small_hub.tier.reader.loaded == loaded + 2


def test_what_only_the_store_has_is_left_out_of_a_match(small_hub):
    member, text = small_hub.join(), tokens(9, 3 * CHUNK)
    run = member.store(text).run
    small_hub.settle()
    state = small_hub.state
    middle = state.indexes.get(namespace().digest).runs[run].chunks[CHUNK]
    state.cache.remove(middle)
    found = member.lookup(text)
    assert [match.span for match in found.matches] == [Span(0, CHUNK), Span(2 * CHUNK, 3 * CHUNK)]
    assert [match.source_start for match in found.matches] == [0, 2 * CHUNK]
    assert found.on_the_way == small_hub.ask(wire.Preview(), [text.tobytes()]).on_the_way == (Span(CHUNK, 2 * CHUNK),)
    assert [piece.span for piece in found.pieces] == [match.span for match in found.matches]
    member.check(found, text)


def test_everything_stored_is_matchable_after_a_restart(make_hub, tmp_path):
    hub = make_hub(n_slots=32, store=tmp_path / "store")
    member = hub.join()
    fill(hub, member)
    grown = tokens(50, 3 * CHUNK)
    run = member.store(grown, Span(0, CHUNK)).run
    member.store(grown, Span(CHUNK, 3 * CHUNK), run=run)
    member.store(tokens(51, 50), exact=False)
    hub.restart()
    member = hub.join()
    hub.state.check_integrity()
    for text in [*TEXTS, grown]:
        found = member.read(text, wait_s=5.0)
        assert sum(len(piece.span) for piece in found.pieces) == len(text)
        assert all(match.exact for match in found.matches)
        member.check(found, text)
    blended = member.read(tokens(51, 50), wait_s=5.0)
    assert blended.pieces and not any(match.exact for match in blended.matches)


def test_a_run_with_a_lost_chunk_is_restored_around_it(make_hub, tmp_path):
    hub = make_hub(n_slots=32, store=tmp_path / "store")
    text = tokens(1, 6 * CHUNK)
    hub.join().store(text)
    hub.settle()
    (lost,) = (tmp_path / "store").rglob(f"*-{2 * CHUNK}-{3 * CHUNK}.kv")
    lost.unlink()
    hub.restart()
    found = hub.join().read(text, wait_s=5.0)
    assert [piece.span.start // CHUNK for piece in found.pieces] == [0, 1, 3, 4, 5]
    hub.state.check_integrity()


def test_a_damaged_chunk_is_counted_and_never_served(make_hub, tmp_path):
    hub = make_hub(n_slots=32, store=tmp_path / "store")
    fill(hub, hub.join(), TEXTS[:1])
    (damaged,) = (tmp_path / "store").rglob(f"*-0-{CHUNK}.kv")
    content = bytearray(damaged.read_bytes())
    content[-5] ^= 1
    damaged.write_bytes(content)
    hub.restart()
    member = hub.join()
    found = member.read(TEXTS[0], wait_s=5.0)
    assert [piece.span for piece in found.pieces] == [Span(CHUNK, 2 * CHUNK)]
    member.check(found, TEXTS[0])
    assert hub.service.stats().counters["store_corrupted"] == 1
    assert hub.state.indexes.get(namespace().digest).n_chunks == 1
    hub.state.check_integrity()


def test_what_could_not_be_read_just_now_is_found_again(small_hub, monkeypatch):
    member = small_hub.join()
    fill(small_hub, member)

    def fail(*arguments):
        raise StoreFailed("too many open files")

    with monkeypatch.context() as trouble:
        trouble.setattr(small_hub.tier.store, "load_chunks", fail)
        assert not member.lookup(TEXTS[0], wait_s=5.0).matches
        small_hub.settle()
    small_hub.state.check_integrity()
    found = member.read(TEXTS[0], wait_s=5.0)
    assert len(found.pieces) == 2
    member.check(found, TEXTS[0])


def test_clear_empties_the_store_too(small_hub, tmp_path):
    member = small_hub.join()
    fill(small_hub, member)
    member.ask(wire.Clear)
    small_hub.close()
    assert not list((tmp_path / "store").rglob("*.kv"))


@pytest.mark.parametrize("spans", [[(0, 32), (16, 48)], [(0, 64)], [(64, 100)], []])
def test_a_store_that_lists_chunks_that_no_hub_stores_is_restored_without_them(make_hub, tmp_path, monkeypatch, spans):
    hub = make_hub(n_slots=8, store=tmp_path / "store")
    fill(hub, hub.join(), TEXTS[:2])
    good, bad = list(hub.tier.store.runs())
    bad = msgspec.structs.replace(bad, chunks=tuple(Span(*span) for span in spans))
    restored = make_hub(n_slots=8, store=tmp_path / "another")
    monkeypatch.setattr(restored.tier.store, "runs", lambda: iter([bad, good]))
    assert restored.tier.restore() == 2
    restored.state.check_integrity()
