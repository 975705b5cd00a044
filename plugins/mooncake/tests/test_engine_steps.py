"""No step of an engine waits for a fleet in trouble: what decodes beside a prompt that would be fetched goes on."""

import contextlib
import itertools
import statistics
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import pytest
from members import FOUND_S, child_of, stopped

from blendhub.client.hub_client import HubClient
from harness.engines import ONE_THREAD, Engine
from harness.engines.tiny_model import make_tiny_model
from harness.servers.mooncake_cluster import Cluster, wait_until
from harness.servers.redis_server import RedisServer, needs_redis
from harness.servers.served_hub import START_S, ServedHub

pytestmark = [
    pytest.mark.slow,
    pytest.mark.alone,
    pytest.mark.long,
    pytest.mark.timeout(600),
    needs_redis,
]
LONGER_S = 0.05
"""By so much may the longest step be longer than without reuse."""
DOCUMENTS, TOKENS = 10, 1000
ROOM_GIB = 0.01
"""For half of the documents, so that each has to be fetched when it is asked for again."""
ROUNDS = 3
DEADLINES = {"deadline_s": "1", "transfer_deadline_s": "1"}
STEP_TOKENS = 256
STREAM_TOKENS = 500
"""Decoding them takes longer than the deadlines."""


class Fleet(NamedTuple):
    redis: RedisServer
    cluster: Cluster
    hub: ServedHub
    client: HubClient
    engine: Engine

    def step_s(self, mode: str) -> float:
        """The longest between two tokens while a prompt is asked whose KV is elsewhere: the median of some rounds."""
        return statistics.median(self._longest_s(mode) for _ in range(ROUNDS))

    def fetches(self) -> bool:
        """Whether KV comes from elsewhere."""
        before = self.client.stats().counters["fleet_fetched_bytes"]
        self.engine.one(next(PROMPTS))
        return self.client.stats().counters["fleet_fetched_bytes"] > before

    def _longest_s(self, mode: str) -> float:
        self.engine.forget()
        beside = self.engine.beside(document(0)[:100], STREAM_TOKENS, next(PROMPTS), mode=mode)
        assert beside.answer.tokens
        return beside.longest_gap_s


def document(number: int) -> list[int]:
    return np.random.default_rng(number).integers(10, 990, TOKENS).tolist()


PROMPTS = ([*document(DOCUMENTS + turn)[:50], *document(turn % DOCUMENTS)] for turn in itertools.count())
"""Each is new, and ends with the document that was not asked for the longest."""


@pytest.fixture(scope="module")
def fleet(mooncake_is_here: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    with contextlib.ExitStack() as closing:
        redis = closing.enter_context(RedisServer())
        cluster = closing.enter_context(Cluster())
        cluster.start_master()
        cluster.start_node()
        settings = {"master": cluster.address, "catalogue": redis.url, **DEADLINES}
        hub = closing.enter_context(contextlib.closing(ServedHub(folder, "hub", ROOM_GIB, settings)))
        client = closing.enter_context(HubClient(hub.endpoint))
        wait_until(client.stats, START_S)
        model = make_tiny_model(folder / "tiny")
        settings = {"endpoint": hub.endpoint, "policy": {"max_recompute_share": 1.0}}
        engine = closing.enter_context(
            Engine(model, settings, variables=ONE_THREAD, max_num_batched_tokens=STEP_TOKENS)
        )
        for number in range(DOCUMENTS):
            engine.one(document(number))
            wait_until(lambda: not client.stats().gauges["store_waiting_chunks"], FOUND_S)
        yield Fleet(redis, cluster, hub, client, engine)


@contextlib.contextmanager
def between(begin: Callable[[], None], end: Callable[[], None]) -> Iterator[None]:
    begin()
    try:
        yield
    finally:
        end()


TROUBLES: dict[str, Callable[[Fleet], contextlib.AbstractContextManager[None]]] = {
    "frozen Mooncake process": lambda fleet: stopped(child_of(fleet.hub)),
    "frozen node": lambda fleet: stopped(fleet.cluster.nodes[0].pid),
    "frozen master": lambda fleet: stopped(fleet.cluster.master.pid),  # type: ignore[union-attr]
    "frozen Redis": lambda fleet: between(fleet.redis.freeze, fleet.redis.thaw),
    "frozen hub": lambda fleet: stopped(fleet.hub.process.pid),
    "killed Redis": lambda fleet: between(fleet.redis.kill, fleet.redis.start),
}


@pytest.fixture(scope="module")
def without(fleet: Fleet) -> float:
    """The longest step without reuse."""
    return fleet.step_s("off")


@pytest.mark.parametrize("trouble", TROUBLES)
def test_no_step_is_longer(trouble: str, fleet: Fleet, without: float) -> None:
    wait_until(fleet.fetches, FOUND_S)
    with TROUBLES[trouble](fleet):
        troubled = fleet.step_s("blend")
    assert troubled < without + LONGER_S
