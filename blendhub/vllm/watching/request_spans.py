"""OpenTelemetry's spans of what BlendHub did for a request: children of the span that vLLM makes of it.

vLLM makes that span in its front end, when the request has ended. So the scheduler only times, and what it timed comes
to the front end with the statistics. This module is imported only if vLLM traces.
"""

from collections.abc import Iterable

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.trace import SpanContext

from blendhub.core.bounded import put_last
from blendhub.outcome.request_names import names_of
from blendhub.vllm.watching.stats import Timed

REQUEST, REQUEST_ID = "llm_request", "gen_ai.request.id"
"""The name of vLLM's span of a request, and of its attribute with the id that clients know."""

MOST_NAMES = 16_384
"""The most names of requests that are kept: spans of saves come after the request's own, all others before it."""


class RequestSpans(SpanProcessor):
    """Called in vLLM's front end, by the thread that makes the spans of requests and observes the statistics."""

    def __init__(self) -> None:
        self._tracer = trace.get_tracer("blendhub")
        self._ended: dict[str, SpanContext] = {}
        """The spans of requests, by the ids that clients know; the oldest first."""
        self._waiting: dict[str, list[Timed]] = {}
        """What is to become a child of a span that is not there yet, by each name that its request may have."""
        provider = trace.get_tracer_provider()
        if isinstance(provider, TracerProvider):
            provider.add_span_processor(self)

    def on_end(self, span: ReadableSpan) -> None:
        request, context = (span.attributes or {}).get(REQUEST_ID), span.get_span_context()
        if span.name != REQUEST or not isinstance(request, str) or context is None:
            return
        put_last(self._ended, request, context, MOST_NAMES)
        for timed in self._waiting.pop(request, ()):
            for name in names_of(timed.request):
                self._waiting.pop(name, None)
            self._make(timed, context)

    def observe(self, times: Iterable[Timed]) -> None:
        for timed in times:
            names = names_of(timed.request)
            context = next((self._ended[name] for name in names if name in self._ended), None)
            if context:
                self._make(timed, context)
                continue
            for name in names:
                put_last(self._waiting, name, [*self._waiting.get(name, ()), timed], MOST_NAMES)

    def _make(self, timed: Timed, parent: SpanContext) -> None:
        context = trace.set_span_in_context(trace.NonRecordingSpan(parent))
        start, end = (round(at * 1e9) for at in (timed.start, timed.end))
        span = self._tracer.start_span(f"blendhub.{timed.name}", context, start_time=start, attributes=timed.attributes)
        span.end(end)
