"""What indexes take beyond the KV that they index is charged to its engine, whose oldest text makes room for more."""

import logging

import pytest

from blendhub.core.errors import ArenaFull
from blendhub.core.layout import Variant
from blendhub.core.spans import Span
from blendhub.hub import index_limit
from tests.hub.hub_direct import CHUNK, namespace, tokens

ROOM = 2**22
N_SALTS = 300
"""The matchers of so many salts take twice the room."""
TEXT = tokens(1, CHUNK)


@pytest.fixture(autouse=True)
def little_room(monkeypatch):
    monkeypatch.setattr(index_limit, "FREE_INDEX_BYTES", ROOM)


def salt(number: int) -> Variant:
    return Variant(cache_salt=str(number))


def flood(member, n: int = N_SALTS) -> None:
    for number in range(n):
        assert member.store(tokens(number, CHUNK), variant=salt(number)).lease is not None


def has(member, number: int) -> bool:
    found = member.lookup(tokens(number, CHUNK), variant=salt(number), acquire=False)
    return bool(found.matches or found.on_the_way)


def test_an_engine_of_many_salts_loses_its_oldest_text_and_other_engines_none(make_hub, caplog):
    hub = make_hub(n_slots=N_SALTS + 50)
    good, hostile = hub.join("good"), hub.join("hostile", namespace=namespace("hostile"))
    good.store(TEXT)
    with caplog.at_level(logging.WARNING):
        flood(hostile)
    stats = hub.service.stats()
    assert stats.gauges["matcher_bytes"] < 1.1 * ROOM
    kept = [has(hostile, number) for number in range(N_SALTS)]
    assert kept == sorted(kept) and kept[0] is False and kept[-1] is True, "the oldest ones make room"
    assert stats.counters["index_evictions"] == kept.count(False)
    (line,) = caplog.messages
    assert "hostile" in line and "the text that they stored first" in line
    assert good.store(tokens(2, CHUNK)).lease is not None
    good.check(good.read(TEXT), TEXT)
    assert len(good.read(TEXT).pieces) == 1
    hub.state.check_integrity()


@pytest.mark.parametrize("held", ["read", "written"])
def test_an_engine_that_holds_its_text_is_refused_and_no_other_engine(make_hub, held):
    hub = make_hub(n_slots=N_SALTS + 50)
    good, hostile = hub.join("good"), hub.join("hostile", namespace=namespace("hostile"))
    with pytest.raises(ArenaFull, match=r"this engine's index takes \d+ MiB more than its KV"):
        for number in range(N_SALTS):
            reserved = hostile.reserve(tokens(number, CHUNK), variant=salt(number))
            if held == "read":
                hostile.commit(reserved)
                assert hostile.lookup(tokens(number, CHUNK), variant=salt(number)).lease is not None
    for number in range(20):
        assert good.store(tokens(number, CHUNK), variant=salt(number)).lease is not None
    assert hub.service.stats().gauges["matcher_bytes"] < 1.3 * ROOM
    hub.state.check_integrity()
    # When the leases have expired, there is room.
    hub.now += 1000.0
    hub.service.tick()
    hostile.join()
    assert hostile.store(TEXT, variant=salt(0)).lease is not None


def test_tokens_that_are_kept_for_prefixes_without_kv_make_room(hub):
    """One stored token behind a long prefix costs that prefix's tokens."""
    member = hub.join()
    for seed in range(64):
        member.store(tokens(seed, 100_000), Span(99_999, 100_000))
        assert hub.service.stats().gauges["matcher_bytes"] < 1.2 * ROOM
    assert hub.service.stats().gauges["chunks"] > 8, "ten of these prefixes fit"
    hub.state.check_integrity()


def test_what_makes_room_leaves_the_hub_s_own_store_too(make_hub, tmp_path):
    hub = make_hub(n_slots=N_SALTS, store=tmp_path / "store")
    flood(hub.join())
    hub.settle()
    hub.close()
    again = make_hub(n_slots=N_SALTS, store=tmp_path / "store")
    member = again.join()
    assert not has(member, 0) and has(member, N_SALTS - 1)
    again.state.check_integrity()
