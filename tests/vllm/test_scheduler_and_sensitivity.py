"""The scheduler side and what is known of tokens' sensitivity: who gets it, and which copies are compared."""

import time

import msgspec
import numpy as np
import pytest

pytest.importorskip("vllm", reason="the adapter's tests need vLLM; `make setup` installs it")

from vllm.v1.core.sched.output import SchedulerOutput

from blendhub import Span
from blendhub.hub.config import StoreChoice
from tests.vllm.played_engine import HOST, played_engine, text


@pytest.fixture
def engine():
    with played_engine() as engine:
        yield engine


def copies_asked(engine, name, prompt):
    """What the next plan asks workers to compare after a request that reuses nothing."""
    request = engine.request(name, prompt)
    request.kv_transfer_params = {"blendhub": {"mode": "off"}}
    engine.side.arrived(request)
    engine.settle()
    assert engine.side.matched(request, 0) == (0, False)
    engine.step(**{name: (0, len(prompt))})
    request.append_output_token_ids(1)
    engine.end(request, len(prompt))
    assert engine.side.has_work == bool(engine.side.loads._copies)
    return engine.side.plan(SchedulerOutput.make_empty()).copies


def test_text_that_was_stored_before_and_is_stored_again_is_compared(engine):
    document, prompt = text(0, 96), [*text(1, 32), *text(0, 96), *text(2, 32)]
    engine.serve("a", document)
    (job,) = copies_asked(engine, "b", prompt)
    assert job.request == "b" and job.tokens.tolist() == prompt
    assert [(match.span, match.source_start) for match in job.earlier] == [(Span(32, 128), 0)]
    assert not engine.side.has_work
    assert copies_asked(engine, "c", text(3, 96)) == [], "nothing of it was stored"
    assert copies_asked(engine, "d", text(0, 96)) == [], "it is stored exactly"


def test_a_request_that_reuses_nothing_fetches_nothing_from_the_store(tmp_path):
    """What only the store has is not compared: the request has not asked for it."""
    store = StoreChoice(options={"path": str(tmp_path), "capacity_gib": 0.01})
    document, prompt = text(0, 96), [*text(1, 32), *text(0, 96), *text(2, 32)]
    with played_engine(store=store) as engine:
        engine.serve("a", document)
        until = time.monotonic() + 20
        while engine.client.stats().counters["store_saves"] < 3:
            assert time.monotonic() < until
    with played_engine(store=store) as engine:
        assert engine.client.preview(np.asarray(prompt, np.uint32)).on_the_way_tokens == 96
        assert copies_asked(engine, "b", prompt) == []
        engine.settle()
        counters = engine.client.stats().counters
        assert (counters["store_loads"], counters["tokens_moved"]) == (0, 0)


def test_a_blended_request_has_no_copies_to_compare(engine):
    engine.serve("a", text(0, 96))
    assert engine.serve("b", [*text(1, 32), *text(0, 96), *text(2, 32)])
    assert not engine.side.has_work and engine.side.loads._copies == []


@pytest.mark.parametrize("capabilities", [("sensitivity",), ()], ids=["asked for", "not asked for"])
def test_workers_get_what_is_known_of_sensitivity_if_the_selector_uses_it(capabilities, monkeypatch):
    spec = HOST.spec
    monkeypatch.setattr(
        HOST, "spec", lambda kind, name: msgspec.structs.replace(spec(kind, name), capabilities=capabilities)
    )
    with played_engine() as engine:
        engine.serve("a", text(0, 96))
        matches = engine.client.lookup(np.asarray(text(0, 96), np.uint32), acquire=False).matches
        engine.client.learn(matches, bytes(range(1, 97)))
        request = engine.request("b", [*text(1, 32), *text(0, 96), *text(2, 32)])
        engine.side.arrived(request)
        n_external, _ = engine.side.matched(request, 0)
        engine.side.allocated(request, list(range(1, 9)), n_external)
        (job,) = engine.side.plan(SchedulerOutput.make_empty()).loads
        assert job.sensitivity == (bytes(32) + bytes(range(1, 97)) if capabilities else b"")
        engine.side.ended(request, list(range(1, 9)))
