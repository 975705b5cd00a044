"""Hubs go on alone while Redis is killed, frozen or full, and follow again by themselves."""

import threading
import time

import pytest

from harness.servers.redis_server import RedisServer, needs_redis
from tests.hub.fleet_direct import TEXT, Fleet, count, known, read, store
from tests.hub.hub_direct import CHUNK, tokens

pytestmark = [pytest.mark.slow, needs_redis]


@pytest.fixture
def server():
    with RedisServer() as server:
        yield server


def two_hubs(make_hub, server, tmp_path, **options):
    """A fleet, its hubs, of which one has stored a text, and an engine on each."""
    fleet = Fleet(make_hub, server, tmp_path / "place", **options)
    one, other = fleet.pair()
    members = [one.join(), other.join()]
    store(one, members[0])
    fleet.until_each_knows(3)
    return fleet, (one, other), members


def test_without_redis_hubs_go_on_alone_and_catch_up_by_themselves(make_hub, server, tmp_path):
    fleet, (one, other), members = two_hubs(make_hub, server, tmp_path, deadline_s=1.0)
    server.kill()
    alone = tokens(2, 2 * CHUNK)
    began = time.monotonic()
    for hub, member in zip((one, other), members, strict=True):
        store(hub, member, alone)
        assert read(member, alone) == 2 * CHUNK
        assert count(hub, "store_failures") > 0
    assert read(members[1]) == 0, "it cannot be fetched now"
    assert time.monotonic() - began < 20
    fleet.until(lambda: not other.follower.in_step, "the hub notices")
    server.start()
    store(one, members[0], tokens(3, CHUNK))
    fleet.until(lambda: one.follower.in_step and other.follower.in_step, "the hubs follow again")
    after = tokens(4, 2 * CHUNK)
    store(one, members[0], after)
    fleet.until(lambda: read(members[1], after) == 2 * CHUNK, "what came after is found")
    # Redis remembered nothing, so what only the fleet had is forgotten; what is in an arena is not, and what was stored
    # meanwhile is sent now: the text that both have, one more chunk, and what came after.
    fleet.until(lambda: known(other) == 2 + 2 + 1 + 2, "the other hub forgets the three chunks from before")
    assert read(members[1], tokens(3, CHUNK)) == CHUNK
    assert count(one, "store_waiting_chunks") == 0
    assert read(members[0]) == len(TEXT)
    assert count(other, "fleet_snapshots") >= 2
    for hub in (one, other):
        hub.state.check_integrity()


def test_a_hub_may_start_before_redis(make_hub, server, tmp_path):
    server.kill()
    fleet = Fleet(make_hub, server, tmp_path / "place", deadline_s=1.0)
    one = fleet.hub()
    member = one.join()
    store(one, member)
    assert read(member) == len(TEXT)
    server.start()
    fleet.until(lambda: one.follower.hubs == 1, "the hub joins")
    store(one, member, tokens(2, CHUNK))
    fleet.until(lambda: len(fleet.files()) == 4, "what was stored before is sent as well")


def test_a_frozen_redis_delays_no_request(make_hub, server, tmp_path):
    fleet, (one, other), members = two_hubs(make_hub, server, tmp_path, deadline_s=0.5)
    server.freeze()
    thawing = threading.Timer(3.0, server.thaw)
    thawing.start()
    slowest = 0.0
    for seed in range(50, 60):
        began = time.monotonic()
        members[0].store(tokens(seed, CHUNK))
        members[1].lookup(TEXT, acquire=False)
        slowest = max(slowest, time.monotonic() - began)
    assert slowest < 0.5, "a request waited for Redis"
    thawing.join()
    fleet.until(lambda: one.follower.in_step and other.follower.in_step, "the hubs follow again")
    fleet.until(lambda: read(members[1]) == len(TEXT), "the other hub's chunks come again")


def test_a_full_redis_costs_sharing_alone(make_hub, server, tmp_path):
    fleet, (one, other), members = two_hubs(make_hub, server, tmp_path)
    server.client().config_set("maxmemory", "1kb")
    more = tokens(2, 2 * CHUNK)
    store(one, members[0], more)
    assert count(one, "store_failures") > 0 and known(other) == 3
    assert read(members[0], more) == 2 * CHUNK
    assert read(members[1]) == len(TEXT), "what is catalogued is still fetched"
    fleet.until(lambda: one.follower.in_step and other.follower.in_step, "following goes on")
    server.client().config_set("maxmemory", "0")
    time.sleep(0.6)
    store(one, members[0], tokens(3, 2 * CHUNK))
    fleet.until(lambda: known(other) == 5, "sharing goes on")
    for hub in (one, other):
        hub.state.check_integrity()
