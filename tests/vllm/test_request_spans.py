"""Spans of what was timed, as children of the request's span, whichever comes first."""

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from blendhub.vllm.watching import request_spans
from blendhub.vllm.watching.request_spans import RequestSpans
from blendhub.vllm.watching.stats import Timed


@pytest.fixture
def exporter(monkeypatch):
    provider, exporter = TracerProvider(), InMemorySpanExporter()
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return exporter


def end_request(name: str, span: str = "llm_request") -> int:
    """vLLM ends a request; returns its span's id."""
    made = trace.get_tracer("vllm").start_span(span, attributes={"gen_ai.request.id": name})
    made.end()
    return made.get_span_context().span_id


def made(exporter: InMemorySpanExporter) -> list[tuple[str, int]]:
    ours = [span for span in exporter.get_finished_spans() if span.name.startswith("blendhub.")]
    return [(span.name, span.parent.span_id) for span in ours]


def test_what_was_timed_before_and_after_the_request_s_end_has_its_span_as_parent(exporter):
    spans = RequestSpans()
    # vLLM and its clients know a request by different ids.
    spans.observe(
        [Timed("cmpl-1-0-0a1b2c3d", "lookup", 1.0, 2.0, {"found_tokens": 3}), Timed("b", "load", 1.0, 2.0, {})]
    )
    end_request("cmpl-1-0", "another span")
    assert made(exporter) == []
    request = end_request("cmpl-1-0")
    assert made(exporter) == [("blendhub.lookup", request)]
    spans.observe([Timed("cmpl-1-0-0a1b2c3d", "save", 2.0, 4.0, {})])
    assert made(exporter) == [("blendhub.lookup", request), ("blendhub.save", request)]
    lookup, save = (span for span in exporter.get_finished_spans() if span.name.startswith("blendhub."))
    assert (lookup.start_time, lookup.end_time, dict(lookup.attributes)) == (10**9, 2 * 10**9, {"found_tokens": 3})
    assert save.end_time == 4 * 10**9
    other = end_request("b")
    assert made(exporter)[2:] == [("blendhub.load", other)]


def test_requests_without_a_span_take_a_bounded_number_of_names(exporter, monkeypatch):
    monkeypatch.setattr(request_spans, "MOST_NAMES", 10)
    spans = RequestSpans()
    for number in range(30):
        spans.observe([Timed(f"aborted{number}", "lookup", 1.0, 2.0, {})])
    end_request("aborted0")
    assert made(exporter) == []
    parent = end_request("aborted29")
    assert made(exporter) == [("blendhub.lookup", parent)]
