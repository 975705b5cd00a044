"""What became of the last requests of each engine."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from blendhub.core.bounded import put_last
from blendhub.hub.limits import MAX_KEPT_REPORTS, MAX_REPORTING_ENGINES
from blendhub.outcome.report import Outcome


class _Kept(NamedTuple):
    request: str
    outcome: bytes
    """The outcome, encoded as JSON."""


class ReportTable:
    """The outcomes, kept as bytes, which take a tenth of the memory of objects."""

    def __init__(self) -> None:
        self._of_engines: dict[str, deque[_Kept]] = {}
        """The outcomes of each engine; the engine that was silent longest comes first."""

    def add(self, engine: str, outcomes: Sequence[Outcome]) -> None:
        kept = self._of_engines.get(engine) or deque(maxlen=MAX_KEPT_REPORTS)
        put_last(self._of_engines, engine, kept, MAX_REPORTING_ENGINES)
        kept.extend(_Kept(outcome.request, msgspec.json.encode(outcome)) for outcome in outcomes)

    def engines(self) -> list[str]:
        return sorted(self._of_engines)

    @property
    def latest_engine(self) -> str:
        """The engine that reported last; empty if none did."""
        return next(reversed(self._of_engines), "")

    def encoded(self, engine: str) -> list[bytes]:
        """An engine's outcomes as JSON, the newest first."""
        return [kept.outcome for kept in reversed(self._of_engines.get(engine, ()))]

    def find(self, request: str) -> tuple[str, Outcome] | None:
        """The newest outcome of a request, and its engine. vLLM and clients know requests by different beginnings."""
        for engine in reversed(self._of_engines):
            for kept in reversed(self._of_engines[engine]):
                # An engine adds a number or letters behind a dash.
                if kept.request == request or kept.request.startswith(f"{request}-"):
                    return engine, msgspec.json.decode(kept.outcome, type=Outcome)
        return None
