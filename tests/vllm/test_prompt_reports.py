"""What the scheduler side tells the hub of each request that has ended."""

import time

import pytest

pytest.importorskip("vllm", reason="the adapter's tests need vLLM; `make setup` installs it")

from tests.vllm.played_engine import PlayedEngine, played_engine, text
from tests.vllm.standing_still import standing_still


@pytest.fixture
def engine():
    with played_engine() as engine:
        yield engine


def reported(engine: PlayedEngine, request: str):
    """The hub's answer, as `blendhub explain` asks for it."""
    engine.settle()
    return engine.client.explain(request)


def test_the_hub_knows_what_became_of_a_prompt_when_its_request_has_ended(engine):
    engine.serve("a", text(0, 96))
    reuse = engine.request("b", text(1, 32) + text(0, 96))
    engine.side.arrived(reuse)
    there = engine.load(reuse)
    assert engine.client.explain("b").report is None
    engine.step(b=(there, 128 - there))
    engine.end(reuse, 128)
    found = reported(engine, "b")
    assert found.engine == "engine" and found.report.prompt_tokens == 128
    # The last token is always computed.
    assert [(one.span.start, one.span.end, one.fate) for one in found.report.strip] == [
        (0, 32, "hole"), (32, 127, "moved"), (127, 128, "computed"),
    ]  # fmt: skip
    (source,) = found.report.sources
    assert (source.span.start, source.span.end, source.source_start, source.exact) == (32, 127, 0, False)
    assert found.report.reason is None


def test_a_prompt_of_which_nothing_was_reused_is_reported_with_the_reason(engine):
    engine.serve("a", text(0, 64))
    report = reported(engine, "a").report
    assert (
        report.tokens == {"computed": 64}
        and report.sources == ()
        and report.reason == "nothing of this prompt is stored"
    )


def test_a_failed_load_is_reported_as_computed(engine):
    engine.serve("a", text(0, 96))
    failing = engine.request("b", text(1, 32) + text(0, 96))
    engine.side.arrived(failing)
    engine.load(failing, error="the lease expired")
    engine.step(b=(0, 128))
    engine.end(failing, 128)
    report = reported(engine, "b").report
    assert report.tokens == {"computed": 128} and report.reason == "the lease expired" and not report.sources


def test_reports_that_could_not_be_sent_are_sent_with_the_next_one(engine):
    started = time.monotonic()
    with standing_still(engine.hub):
        for name in ("a", "b", "c"):
            request = engine.request(name, text(0, 32))
            engine.side.prompts.ended(engine.side._requests.get(name) or state_of(engine, request), "refused")
        assert time.monotonic() - started < 1, "the scheduler waited for the hub"
    engine.settle()
    assert [reported(engine, name).report.reason for name in ("a", "b", "c")] == ["refused"] * 3


def state_of(engine: PlayedEngine, request):
    engine.side.arrived(request)
    return engine.side._requests[request.request_id]


def test_while_the_hub_does_not_answer_the_oldest_reports_are_forgotten(engine):
    state = state_of(engine, engine.request("a", text(0, 32)))
    engine.side.executor.registered.close()
    for _ in range(1000):
        engine.side.prompts.ended(state, None)
    engine.settle()
    assert len(engine.side.prompts._waiting) == 256
