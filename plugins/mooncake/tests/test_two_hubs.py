"""Two hubs, each with an arena, a client and a Mooncake process, and what one stored is read through the other."""

import contextlib
import itertools
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from blendhub.core.errors import ArenaFull
from harness.servers.mooncake_cluster import Cluster
from harness.servers.redis_server import RedisServer, needs_redis
from harness.servers.served_hub import ServedHub
from harness.waiting import wait_until
from plugins.mooncake.tests.members import CHUNK, DOCUMENT, FOUND_S, SMALL, Member

pytestmark = [pytest.mark.slow, needs_redis]
SOAKED_S = 30.0
WATCH = Path(__file__).parents[3] / "docs/watch.md"
WATCHED = ("fleet_fetched_bytes", "fleet_mooncake_starts", "store_corrupted")


@pytest.fixture
def join(tmp_path: Path, lasting_cluster: Cluster) -> Iterator[Callable[..., Member]]:
    """Starts one more hub of the fleet."""
    with contextlib.ExitStack() as closing:
        redis = closing.enter_context(RedisServer())

        def start(name: str, cluster: Cluster = lasting_cluster, arena_gib: float = 0.02) -> Member:
            settings = {"catalogue": redis.url, "master": cluster.address, "transfer_deadline_s": "10"}
            hub = closing.enter_context(contextlib.closing(ServedHub(tmp_path, name, arena_gib, settings)))
            return Member(hub, closing.enter_context(hub.client(SMALL)))

        yield start


def test_what_one_hub_stores_another_reads_at_any_place_of_a_prompt(join: Callable[..., Member]) -> None:
    one, other = join("one"), join("other")
    one.store(1, 2, 3)
    other.find(1, 2, 3)
    assert other.tokens_of(9, 3) >= DOCUMENT - 2 * CHUNK, "a document of it, behind another text"
    other.store(4)
    one.find(4)
    # All but those of the store whose bytes are in a directory.
    documented = set(re.findall(r"`blendhub_(fleet_(?!directory_)\w+)`", WATCH.read_text(encoding="utf-8")))
    stats = one.client.stats()
    shown = {f"{name}_total" for name in stats.counters} | set(stats.gauges)
    assert documented == {name for name in shown if name.startswith("fleet_")}


def test_what_a_killed_hub_stored_is_still_found_and_a_new_hub_finds_it_too(join: Callable[..., Member]) -> None:
    one, other = join("one"), join("other")
    one.store(11, 12)
    wait_until(lambda: one.count("store_saves") >= 16, FOUND_S)
    one.hub.process.kill()
    one.hub.process.wait()
    other.find(11, 12)
    join("third").find(11, 12)


@pytest.mark.long
@pytest.mark.timeout(SOAKED_S + 240)
def test_no_byte_is_wrong_while_mooncake_evicts_and_what_moves_the_bytes_is_killed(
    join: Callable[..., Member], cluster: Cluster
) -> None:
    """Each arena has room for 20 documents, Mooncake for 60, and there are 100."""
    cluster.start_master()
    cluster.start_node(2**24)
    members = [join(name, cluster, 20 * 8 * SMALL.slot_bytes / 2**30) for name in ("one", "other")]
    chance = random.Random(1)
    n_read, end = 0, time.monotonic() + SOAKED_S
    for turn in itertools.count():
        member = chance.choice(members)
        with contextlib.suppress(ArenaFull):
            (fate,) = chance.choices(("commit", "abort", "leave"), (18, 1, 1))
            member.store(*(chance.randrange(100) for _ in range(3)), fate=fate)
        n_read += chance.choice(members).tokens_of(*(chance.randrange(100) for _ in range(3)))
        if turn % 40 == 20:
            member.kill_what_moves_bytes()
        if time.monotonic() > end:
            break
    sums = Counter({name: sum(member.count(name) for member in members) for name in WATCHED})
    assert n_read and sums["fleet_fetched_bytes"], "nothing came from the other hub"
    assert sums["fleet_mooncake_starts"] > 2, "nothing was killed"
    assert not sums["store_corrupted"]
