"""The last reports of each engine about what became of its prompts."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from blendhub.core.bounded import put_last
from blendhub.hub.limits import MOST_KEPT_REPORTS, MOST_REPORTING_ENGINES
from blendhub.outcome.report import PromptReport


class _Kept(NamedTuple):
    request: str
    report: bytes
    """The report as JSON."""


class ReportTable:
    """The reports, kept as bytes, which take a tenth of the memory of objects."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._of_engines: dict[str, deque[_Kept]] = {}
        """The reports of each engine; the engine that was silent longest comes first."""

    def add(self, engine: str, reports: Sequence[PromptReport]) -> None:
        kept = self._of_engines.get(engine) or deque(maxlen=MOST_KEPT_REPORTS)
        put_last(self._of_engines, engine, kept, MOST_REPORTING_ENGINES)
        now = self._clock()
        kept.extend(
            _Kept(report.request, msgspec.json.encode(msgspec.structs.replace(report, ended_at=now)))
            for report in reports
        )

    def engines(self) -> list[str]:
        return sorted(self._of_engines)

    @property
    def latest_engine(self) -> str:
        """The engine that reported last; empty if none did."""
        return next(reversed(self._of_engines), "")

    def encoded(self, engine: str) -> list[bytes]:
        """An engine's reports as JSON, the newest first."""
        return [kept.report for kept in reversed(self._of_engines.get(engine, ()))]

    def find(self, request: str) -> tuple[str, PromptReport] | None:
        """The newest report of a request, and its engine. vLLM and clients know requests by different beginnings."""
        for engine in reversed(self._of_engines):
            for kept in reversed(self._of_engines[engine]):
                if is_same_request(kept.request, request):
                    return engine, msgspec.json.decode(kept.report, type=PromptReport)
        return None


def is_same_request(of_engine: str, asked: str) -> bool:
    """Whether a client's request id is that of an engine, which adds a number or letters behind a dash."""
    return of_engine == asked or of_engine.startswith(f"{asked}-")
