"""A load on one rank, with a real hub that may stand still, and copies that end when a test says."""

import time
from concurrent.futures import Future

import numpy as np
import pytest

pytest.importorskip("vllm", reason="the adapter's tests need vLLM; `make setup` installs it")

from blendhub import Match, PluginHost, Span
from blendhub.client.hub_client import HubClient
from blendhub.contracts import Transfer
from blendhub.core.errors import DeadlineExceeded, HubError, PeerGone
from blendhub.core.layout import KVLayout, Namespace, Variant
from blendhub.core.plugin_choice import PluginChoice
from blendhub.hub.config import HubConfig
from blendhub.hub.embedded import HubInThread
from blendhub.vllm.decision import Decision
from blendhub.vllm.messages import LoadJob
from blendhub.vllm.worker.load_task import Arrival, LoadTask
from tests.vllm.standing_still import standing_still

HOST = PluginHost.discover()
LAYOUT = KVLayout(layers=1, kv_heads=1, key_dim=4, value_dim=4, dtype="float32", chunk_tokens=32)
SPACE = Namespace(model="m", layout=LAYOUT, matchers=(PluginChoice("prefix"),))
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


class Stage:
    """One load: its hub, its copy, and what it gave to be released late."""

    def __init__(self, client: HubClient, run: int, start: int = 0) -> None:
        self.client: HubClient | None = client
        self.copy = Copy()
        self.found = None
        self.late = []
        decision = Decision(start, 96, (Match(Span(0, 96), run, 0, True),), 0.0)
        job = LoadJob("r", SALTED, TOKENS, np.arange(6), decision)
        self.loading = LoadTask(job, self.open, self.begin, lambda *late: self.late.append(late), PATIENCE_S)

    def open(self) -> HubClient | None:
        return self.client

    def begin(self, client, found):
        self.found = found
        return self.copy

    def until(self, arrival: Arrival) -> None:
        """Poll as an engine's steps do; no poll may take long."""
        until = time.monotonic() + 5
        while self.loading.arrival is not arrival and time.monotonic() < until:
            started = time.monotonic()
            self.loading.advance()
            assert time.monotonic() - started < 0.2, "a poll waited"
            time.sleep(1e-3)
        assert self.loading.arrival is arrival


class Hub:
    def __init__(self, hub: HubInThread, client: HubClient, run: int) -> None:
        self.hub = hub
        self.client = client
        self.run = run

    def read_leases(self) -> float:
        return self.client.stats().gauges["read_leases"]


@pytest.fixture
def hub():
    with HubInThread(HubConfig(arena_gib=0.001, metrics=""), HOST) as served, served.connect() as client:
        client.register("engine", SPACE, 0)
        reserved = client.reserve(TOKENS, Span(0, 96), SALTED)
        client.commit(reserved.right, 96)
        yield Hub(served, client, client.lookup(TOKENS, SALTED, acquire=False).matches[0].run)


@pytest.fixture
def stage(hub):
    return Stage(hub.client, hub.run)


def test_a_load_is_proven_when_its_lease_held_until_the_copy_had_ended(hub, stage):
    stage.until(Arrival.PENDING)
    while stage.found is None:
        stage.loading.advance()
    assert hub.read_leases() == 1 and stage.loading.is_copying
    stage.copy.ended.set_result(None)
    stage.until(Arrival.PROVEN)
    assert hub.read_leases() == 0


def test_the_hub_is_asked_for_nothing_that_vllm_has_cached(hub):
    stage = Stage(hub.client, hub.run, start=40)
    while stage.found is None:
        stage.loading.advance()
    assert [piece.span for piece in stage.found.pieces] == [Span(40, 64), Span(64, 96)]
    stage.copy.ended.set_result(None)
    stage.until(Arrival.PROVEN)


def test_a_lease_that_ended_before_the_copy_proves_nothing(hub, stage):
    while stage.found is None:
        stage.loading.advance()
    hub.client.release(stage.found.lease)
    stage.copy.ended.set_result(None)
    stage.until(Arrival.LOST)


def test_a_load_that_was_not_asked_for_in_time_is_not_asked_for_at_all(hub):
    """The hub would seem to be silent, and no other request would be loaded until it has answered a ping."""
    stage = Stage(hub.client, hub.run)
    time.sleep(PATIENCE_S)
    stage.until(Arrival.FAILED)
    assert isinstance(stage.loading.error, DeadlineExceeded) and hub.client.is_up


def test_a_copy_that_does_not_end_is_said_once(stage, caplog):
    stage.loading._warn_at = 0.0
    while stage.found is None:
        stage.loading.advance()
    for _ in range(3):
        stage.loading.advance()
    assert caplog.text.count("the copy of request r has not ended") == 1


def test_a_session_that_is_not_open_yet_is_waited_for_but_not_for_ever(hub):
    stage = Stage(hub.client, hub.run)
    stage.client = None
    stage.loading.advance()
    stage.client = hub.client
    stage.copy.ended.set_result(None)
    stage.until(Arrival.PROVEN)
    never = Stage(hub.client, hub.run)
    never.client = None
    never.until(Arrival.FAILED)
    assert isinstance(never.loading.error, DeadlineExceeded)


def test_a_hub_that_stands_still_before_the_lease_fails_the_load_in_time(hub, stage):
    with standing_still(hub.hub):
        started = time.monotonic()
        stage.until(Arrival.FAILED)
        assert time.monotonic() - started < PATIENCE_S
    assert isinstance(stage.loading.error, DeadlineExceeded | PeerGone)


def test_a_hub_that_stands_still_after_the_copy_fails_the_load_in_time(hub, stage):
    while stage.found is None:
        stage.loading.advance()
    with standing_still(hub.hub):
        stage.copy.ended.set_result(None)
        started = time.monotonic()
        stage.until(Arrival.COPIED)
        assert 0 < stage.loading.seconds < PATIENCE_S
        stage.until(Arrival.FAILED)
        assert time.monotonic() - started < PATIENCE_S


def test_a_copy_that_fails_fails_the_load_and_ends_its_lease(hub, stage):
    while stage.found is None:
        stage.loading.advance()
    stage.copy.ended.set_exception(RuntimeError("the device is lost"))
    stage.until(Arrival.FAILED)
    assert hub.read_leases() == 0


def test_a_load_that_is_called_off_keeps_its_blocks_until_its_copy_has_ended(hub, stage):
    while stage.found is None:
        stage.loading.advance()
    stage.loading.cancel()
    stage.loading.advance()
    assert stage.loading.arrival is Arrival.PENDING
    stage.copy.ended.set_result(None)
    stage.until(Arrival.FAILED)
    assert stage.loading.is_cancelled and isinstance(stage.loading.error, HubError)
    assert hub.read_leases() == 0


def test_the_lease_that_a_called_off_load_may_still_get_is_given_to_be_released(hub, stage):
    stage.loading.advance()
    stage.loading.cancel()
    ((client, reply),) = stage.late
    assert client is hub.client and reply.result().lease is not None
    assert stage.loading.arrival is Arrival.FAILED
