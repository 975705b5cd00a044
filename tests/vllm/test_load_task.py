"""A load on the ranks, with a real hub that may stand still, and copies that end when a test says."""

import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from blendhub import PluginHost, Span
from blendhub.client.hub_client import HubClient
from blendhub.contracts import Transfer
from blendhub.core.errors import DeadlineExceeded, HubError, PeerGone
from blendhub.core.layout import KVLayout, Namespace, Variant
from blendhub.core.plugin_choice import PluginChoice
from blendhub.hub.config import HubConfig
from blendhub.hub.embedded import HubInThread
from blendhub.vllm.decision import Decision
from blendhub.vllm.messages import LoadJob, LoadSource
from blendhub.vllm.worker.load_task import LoadProgress, LoadTask
from tests.vllm.standing_still import standing_still

HOST = PluginHost.discover()
LAYOUT = KVLayout(layers=1, kv_heads=1, key_dim=4, value_dim=4, dtype="float32", chunk_tokens=32)
SPACE = Namespace(model="m", layout=LAYOUT, matchers=(PluginChoice("prefix"),), world_size=2)
SALTED = Variant(cache_salt="salt")
TOKENS = np.arange(96, dtype=np.uint32)
PATIENCE_S = 0.4


class Copy(Transfer):
    def __init__(self) -> None:
        self.ended: Future[None] = Future()

    def done(self) -> bool:
        return self.ended.done()

    def wait(self) -> None:
        assert self.ended.done(), "a load waits for no copy"
        self.ended.result()


class Rank:
    """One rank's load, and its copy."""

    def __init__(self, client: HubClient, job: LoadJob, number: int) -> None:
        self.client: HubClient | None = client
        self.copy = Copy()
        adapters: Any = SimpleNamespace(check=lambda adapter, is_loaded: None)
        copies: Any = SimpleNamespace(load=self.begin)
        self.loading = LoadTask(job, lambda: self.client, copies, adapters, PATIENCE_S, releases=number == 0)

    def begin(self, *segments: Any) -> Copy:
        return self.copy

    def until(self, progress: LoadProgress) -> None:
        """Poll as an engine's steps do; no poll may take long."""
        until = time.monotonic() + 5
        while self.loading.progress is not progress and time.monotonic() < until:
            started = time.monotonic()
            self.loading.advance()
            assert time.monotonic() - started < 0.2, "a poll waited"
            time.sleep(1e-3)
        assert self.loading.progress is progress


class Scene:
    """Two ranks and the scheduler, which has looked up a prompt of which vLLM has a beginning cached."""

    def __init__(self, hub: HubInThread, clients: list[HubClient], scheduler: HubClient) -> None:
        self.hub = hub
        self.clients = clients
        found = scheduler.lookup(TOKENS, SALTED).result()
        decision = Decision(40, 96, tuple(match.part(40, 96) for match in found.matches), 0.0)
        pieces = decision.pieces_of(found.pieces)
        assert found.lease
        self.job = LoadJob("r", TOKENS, (np.arange(6),), decision, LoadSource(found.lease, scheduler.epoch, pieces))
        self.ranks = [Rank(client, self.job, number) for number, client in enumerate(clients)]

    def begin(self) -> Rank:
        for rank in self.ranks:
            rank.loading.advance()
            assert rank.loading.is_copying
        return self.ranks[0]

    def leases(self) -> float:
        return self.clients[0].stats().gauges["read_leases"]


@pytest.fixture
def scene():
    with (
        HubInThread(HubConfig(arena_gib=0.001, metrics=""), HOST) as hub,
        hub.connect() as one,
        hub.connect() as other,
        hub.connect() as scheduler,
    ):
        scheduler.register("engine", SPACE)
        for rank, client in enumerate((one, other)):
            client.register("engine", SPACE, rank)
        reserved = one.reserve(TOKENS, Span(0, 96), SALTED)
        for client in (one, other):
            client.commit(reserved.right, 96)
        yield Scene(hub, [one, other], scheduler)


def test_one_lease_serves_both_ranks_and_is_released_after_the_last_copy(scene):
    first, second = scene.ranks
    scene.begin()
    assert [(piece.span, piece.row) for piece in scene.job.source.pieces] == [(Span(40, 64), 8), (Span(64, 96), 0)]
    first.copy.ended.set_result(None)
    first.until(LoadProgress.COPIED)
    assert scene.leases() == 1, "the other rank still copies"
    second.copy.ended.set_result(None)
    second.until(LoadProgress.PROVEN)
    for rank in scene.ranks:
        rank.loading.release()
    first.until(LoadProgress.PROVEN)
    assert scene.leases() == 0


def test_a_copy_that_does_not_end_is_said_once(scene, caplog):
    first = scene.begin()
    first.loading._warn_at = 0.0
    for _ in range(3):
        first.loading.advance()
    assert caplog.text.count("the copy of request r has not ended") == 1


def test_a_session_that_is_not_open_yet_is_waited_for_but_not_for_ever(scene):
    first, second = scene.ranks
    first.client = second.client = None
    first.loading.advance()
    first.client = scene.clients[0]
    first.copy.ended.set_result(None)
    first.until(LoadProgress.COPIED)
    second.until(LoadProgress.FAILED)
    assert isinstance(second.loading.error, DeadlineExceeded)


def test_a_hub_that_stands_still_after_the_copy_fails_the_load_in_time(scene):
    first = scene.begin()
    with standing_still(scene.hub):
        first.copy.ended.set_result(None)
        started = time.monotonic()
        first.until(LoadProgress.COPIED)
        assert 0 < first.loading.seconds < PATIENCE_S
        first.loading.release()
        first.until(LoadProgress.FAILED)
        assert time.monotonic() - started < PATIENCE_S
    assert isinstance(first.loading.error, DeadlineExceeded | PeerGone)


@pytest.mark.parametrize("error", [RuntimeError("the device is lost"), None], ids=["fails", "is called off"])
def test_a_load_that_fails_keeps_its_blocks_until_its_copy_has_ended_and_then_ends_the_lease(scene, error):
    first = scene.begin()
    if error:
        first.copy.ended.set_exception(error)
    else:
        first.loading.cancel()
        first.loading.advance()
        assert first.loading.progress is LoadProgress.PENDING and first.loading.is_cancelled
        first.copy.ended.set_result(None)
    first.until(LoadProgress.FAILED)
    assert isinstance(first.loading.error, type(error) if error else HubError)
    first.loading.release()
    assert scene.leases() == 0
