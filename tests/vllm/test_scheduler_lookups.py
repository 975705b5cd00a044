"""Lookups of requests that wait for their turn: time in the queue costs no reuse, and what vLLM has is left alone."""

import threading
import time

import pytest

from blendhub import Span
from blendhub.hub.config import HubConfig, StoreChoice
from blendhub.hub.embedded import HubInThread
from tests.vllm.played_engine import HOST, PlayedEngine, played_engine, text
from tests.vllm.standing_still import standing_still

DOCUMENT = text(0, 96)
PROMPT = [*DOCUMENT, *text(1, 32)]


@pytest.fixture
def engine():
    with played_engine() as engine:
        engine.serve("stored", DOCUMENT)
        yield engine


@pytest.fixture
def stored(tmp_path):
    """The configuration of a hub whose store alone has the document."""
    config = HubConfig(arena_gib=0.01, metrics="", store=StoreChoice(options={"path": str(tmp_path)}))
    with HubInThread(config, HOST) as hub:
        engine = PlayedEngine(hub)
        engine.serve("stored", DOCUMENT)
        engine.close()
    return config


def arrived(engine, name="r"):
    request = engine.arrived(name, PROMPT)
    return request


def test_what_vllm_has_is_not_leased(engine):
    engine.blocks.cached = lambda hashes, most: 64
    request = arrived(engine)
    assert engine.load(request, local=64) == 96
    (match,) = engine.side._requests["r"].found.matches
    assert match.span == Span(64, 96)


def test_what_vllm_has_evicted_since_the_arrival_is_looked_up_again(engine):
    engine.blocks.cached = lambda hashes, most: 64
    assert engine.load(arrived(engine), local=0) == 96
    assert engine.report("r")["exact_tokens"] == 96


def test_what_vllm_has_is_not_fetched_from_the_store(stored, monkeypatch):
    with HubInThread(stored, HOST) as hub:
        fetched, store = [], hub.hub.service.tier.store
        load = store.load_chunks

        def noted(wanted):
            fetched.extend(span for _, span, _ in wanted)
            return load(wanted)

        monkeypatch.setattr(store, "load_chunks", noted)
        engine = PlayedEngine(hub)
        engine.blocks.cached = lambda hashes, most: 64
        assert engine.load(arrived(engine), local=64) == 96
        assert fetched == [Span(64, 96)]
        engine.close()


@pytest.mark.slow
def test_what_came_from_the_store_while_the_request_waited_is_reused_and_is_the_reason_until_then(stored, monkeypatch):
    with HubInThread(stored, HOST) as hub:
        goes_on, store = threading.Event(), hub.hub.service.tier.store
        load = store.load_chunks
        monkeypatch.setattr(store, "load_chunks", lambda wanted: goes_on.wait(60) and load(wanted))
        engine = PlayedEngine(hub)
        assert engine.load(arrived(engine, "impatient")) == 0
        assert "96 tokens of this prompt were still being read from the store" in engine.report("impatient")["reason"]
        engine.answer_within(5.0)
        request = arrived(engine)
        until = time.monotonic() + 30
        while not engine.side._requests["r"].lookup.done():
            assert time.monotonic() < until
            time.sleep(0.01)
        assert engine.side._requests["r"].lookup.result().on_the_way_tokens == 96
        goes_on.set()
        while len(engine.found(PROMPT, exact=True)) < 96:
            assert time.monotonic() < until
            time.sleep(0.01)
        assert engine.load(request) == 96
        engine.close()


def test_a_lookup_that_failed_while_the_request_waited_is_sent_again(engine):
    engine.answer_within(0.3)
    with standing_still(engine.hub):
        request = arrived(engine)
        time.sleep(0.5)
    engine.step()
    engine.answer_within(30.0)
    until = time.monotonic() + 30
    while not (engine.side.executor.client.is_up and engine.client.is_up):
        assert time.monotonic() < until
        time.sleep(0.01)
    assert engine.load(request) == 96


@pytest.mark.slow
def test_what_a_waiting_request_found_stays_leased():
    """Other requests' texts would push it out of the arena."""
    with HubInThread(HubConfig(arena_gib=0.01, metrics=""), HOST) as hub:
        engine = PlayedEngine(hub)
        engine.serve("stored", DOCUMENT)
        request = arrived(engine)
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            engine.step()
            time.sleep(0.02)
            assert engine.gauge("read_leases") >= 1
        assert not engine.side._requests["r"].lookup.has_ended
        assert engine.load(request) == 96
        engine.settle()
        assert engine.gauge("read_leases") == 0
        engine.close()
