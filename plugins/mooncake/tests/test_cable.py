"""The network of a fleet breaks while bytes are under way, between machines that are network namespaces."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.namespaces import network_or_skip
from harness.servers.mooncake_cluster import Cluster
from harness.servers.network import Machine, Network
from harness.servers.redis_server import RedisServer, needs_redis
from harness.servers.served_hub import ServedHub
from harness.waiting import wait_until
from plugins.mooncake.tests.members import FOUND_S, SMALL, Member

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    needs_redis,
]
DOCUMENTS = 30
ALL_GIB, FEW_GIB = (n * 8 * SMALL.slot_bytes / 2**30 for n in (2 * DOCUMENTS, 10))
"""Room for all documents, and for ten, so that most have to be fetched each time."""
DEADLINES = {"deadline_s": "1", "transfer_deadline_s": "3"}
PULLED_S = 6.0
RESTED_S = 2.0
"""By then every call of before has reached its deadline, and a hub tries again what failed."""
ANSWERED_S = 10.0
"""The most that a lookup, which waits up to five seconds for bytes from elsewhere, and the reading of them may take."""


@pytest.fixture
def network() -> Iterator[Network]:
    with network_or_skip() as network:
        yield network


@pytest.fixture
def machines(network: Network) -> dict[str, Machine]:
    return {name: network.add() for name in ("Redis", "Mooncake", "one hub", "other hub")}


@pytest.fixture
def join(
    tmp_path: Path, mooncake_is_here: None, machines: dict[str, Machine]
) -> Iterator[Callable[[str, float], Member]]:
    """Starts a hub on its machine."""
    with contextlib.ExitStack() as closing:
        redis = closing.enter_context(RedisServer(machine=machines["Redis"]))
        cluster = closing.enter_context(Cluster(machines["Mooncake"]))
        cluster.start_master()
        cluster.start_node()
        settings = {"catalogue": redis.url, "master": cluster.address, **DEADLINES}

        def start(name: str, arena_gib: float) -> Member:
            served = ServedHub(tmp_path, name.replace(" ", "-"), arena_gib, settings, machines[name])
            hub = closing.enter_context(contextlib.closing(served))
            return Member(hub, closing.enter_context(hub.client(SMALL)))

        yield start


class Reading:
    """Reads all documents in turn, in a thread, until the block ends; whatever is wrong is raised there."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self._failure: BaseException | None = None
        self.tokens = 0
        self.longest_s = 0.0

    def __enter__(self) -> "Reading":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()
        if self._failure:
            raise self._failure

    def _read(self) -> None:
        number = 0
        try:
            while not self._stopped.is_set():
                begun = time.monotonic()
                self.tokens += self._member.tokens_of(number % DOCUMENTS)
                self.longest_s = max(self.longest_s, time.monotonic() - begun)
                number += 1
        except BaseException as error:
            self._failure = error


COUNTED = {"Redis": "fleet_catalogue_failures", "Mooncake": "fleet_mooncake_get_failures"}


@pytest.mark.parametrize(
    "pulled",
    [pytest.param("other hub", marks=pytest.mark.long), pytest.param("Redis", marks=pytest.mark.long), "Mooncake"],
)
def test_a_cable_that_is_pulled_while_bytes_are_under_way(
    pulled: str, network: Network, machines: dict[str, Machine], join: Callable[[str, float], Member]
) -> None:
    one, other = join("one hub", ALL_GIB), join("other hub", FEW_GIB)
    for document in range(DOCUMENTS):
        one.store(document)
        # What waits to be sent is bounded, and the rest would stay here.
        wait_until(lambda: not one.client.stats().gauges["store_waiting_chunks"], FOUND_S)
    other.find(DOCUMENTS - 1)
    with Reading(other) as reading:
        _fetches(other)
        network.unplug(machines[pulled])
        time.sleep(PULLED_S)
        assert other.count(COUNTED.get(pulled, "fleet_catalogue_failures"))
        network.plug(machines[pulled])
        _fetches(other)
    assert reading.tokens
    assert reading.longest_s < ANSWERED_S
    time.sleep(RESTED_S)
    # Each hub finds what the other stores from now on.
    one.store(DOCUMENTS)
    other.find(DOCUMENTS)
    other.store(DOCUMENTS + 1)
    one.find(DOCUMENTS + 1)


def _fetches(member: Member) -> None:
    """Wait until so much has come from elsewhere that something is under way at any time."""
    before = member.count("fleet_fetched_bytes")
    wait_until(lambda: member.count("fleet_fetched_bytes") > before + 50 * SMALL.slot_bytes, FOUND_S)
