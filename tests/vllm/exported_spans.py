"""Called in an engine's process: keeps the spans that are made there, beside vLLM's own exporter."""

import sys
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

EXPORTER = InMemorySpanExporter()


def keep() -> None:
    provider: Any = trace.get_tracer_provider()
    provider.add_span_processor(SimpleSpanProcessor(EXPORTER))


def kept() -> list[dict]:
    """The spans since the last call."""
    spans = EXPORTER.get_finished_spans()
    EXPORTER.clear()
    return [
        {
            "name": span.name,
            "id": span.context.span_id,
            "trace": span.context.trace_id,
            "parent": span.parent.span_id if span.parent else None,
            "start": span.start_time,
            "end": span.end_time,
            "attributes": dict(span.attributes),
        }
        for span in spans
    ]


def makes_spans() -> bool:
    return "blendhub.vllm.watching.request_spans" in sys.modules
