"""Spans of a real engine, in the OpenTelemetry SDK's in-memory exporter."""

from typing import Any

import pytest

from harness.engines import Engine
from tests.vllm.conftest import SETTINGS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
HERE = "tests.vllm.exported_spans"
MICROSECOND = 1_000
"""What the conversion of clocks may round; the times are in nanoseconds."""


@pytest.fixture(scope="module")
def engine(model):
    # Nobody listens there; the spans are kept in the engine's process, too.
    options: dict[str, Any] = {"otlp_traces_endpoint": "http://127.0.0.1:9", "disable_log_stats": False}
    with Engine(model, SETTINGS, **options) as engine:
        engine.call("inside", f"{HERE}:keep")
        yield engine


def children(engine):
    """The attributes of our spans by name, once each is seen to be a child of the request's span, within its time."""
    spans = engine.call("inside", f"{HERE}:kept")
    (request,) = (span for span in spans if span["name"] == "llm_request")
    ours = {span["name"]: span for span in spans if span["name"].startswith("blendhub.")}
    assert len(ours) == len(spans) - 1
    for name, span in ours.items():
        assert (span["parent"], span["trace"]) == (request["id"], request["trace"])
        assert request["start"] <= span["start"] <= span["end"], name
        assert span["end"] <= request["end"] or name == "blendhub.save", name
    return ours


def test_the_phases_of_a_request_are_children_of_its_span(engine, texts):
    document = texts.new(400)
    engine.call("inside", f"{HERE}:kept")
    engine.one(document)
    first = children(engine)
    assert first.keys() == {"blendhub.lookup", "blendhub.save"}
    assert first["blendhub.lookup"]["attributes"] == {"found_tokens": 0}
    assert first["blendhub.save"]["attributes"]["tokens"] >= 384
    engine.one([*texts.new(40), *document, *texts.new(9)])
    second = children(engine)
    assert second.keys() == {f"blendhub.{name}" for name in ("lookup", "load", "recompute", "save")}
    assert second["blendhub.load"]["attributes"] == {"exact_tokens": 0, "settled_tokens": 0, "moved_tokens": 400}
    recomputed = second["blendhub.recompute"]["attributes"]
    assert (recomputed["recomputed_tokens"], recomputed["hole_tokens"]) == (60, 40)
    assert second["blendhub.load"]["end"] <= second["blendhub.recompute"]["start"] + MICROSECOND
    engine.one([*texts.new(41), *document, *texts.new(9)], audit=True)
    third = children(engine)
    assert third.keys() == {*second, "blendhub.audit"}
    assert third["blendhub.audit"]["attributes"].keys() == {"agrees", "kl"}
    assert third["blendhub.recompute"]["end"] <= third["blendhub.audit"]["start"] + MICROSECOND


def test_without_traces_nothing_is_imported_and_nothing_timed_for_them(model, texts):
    with Engine(model, SETTINGS, disable_log_stats=False) as engine:
        document = texts.new(400)
        engine.one(document)
        engine.one([*texts.new(40), *document, *texts.new(9)])
        assert not engine.call("inside", f"{HERE}:makes_spans")
