"""Where the KV of one request comes from, span by span."""

from typing import NamedTuple

from blendhub.core.provenance import Kind, Provenance
from blendhub.core.spans import Span
from blendhub.vllm.decision import Decision


class KVSpan(NamedTuple):
    span: Span
    provenance: Provenance


class RequestKV:
    """The spans whose KV was not computed by this request from exact KV alone.

    Every other token's KV is exact before the first approximate one, and was computed after blended KV behind it.
    """

    def __init__(self) -> None:
        self._spans: list[KVSpan] = []
        self._lacking: list[Span] = []
        self._before_load: list[KVSpan] = []

    @property
    def first_approximate(self) -> int | None:
        """The position from which on KV differs from what the model alone computes; None if it differs nowhere."""
        return min((span.start for span, provenance in self._spans if not provenance.is_exact), default=None)

    @property
    def ratio(self) -> float:
        """The least share of moved text that was recomputed."""
        return min((provenance.ratio for _, provenance in self._spans), default=1.0)

    @property
    def blended(self) -> Span | None:
        """From the first approximate token to the last one that was blended."""
        end = max((span.end for span, provenance in self._spans if provenance.kind == "blended"), default=0)
        first = self.first_approximate
        return None if first is None or end <= first else Span(first, end)

    @property
    def not_computed(self) -> list[Span]:
        """The spans whose KV was blended, or loaded by another connector, perhaps of some layers only."""
        return [*(span for span, _ in self._spans), *self._lacking]

    def of_computed(self, donates_from: int) -> Provenance:
        """The provenance of what the model computes now, behind all that the request has."""
        kind: Kind = "exact" if self.first_approximate is None else "after_blended"
        return Provenance(kind, self.ratio, donates_from)

    def came(self, span: Span, provenance: Provenance) -> None:
        """The KV of this span is there, and not computed for this request."""
        if len(span):
            self._spans.append(KVSpan(span, provenance))

    def lacks(self, span: Span) -> None:
        """Layers with windows have no KV of some tokens of this span; what there is may be exact."""
        self._lacking.append(span)

    def begin_load(self, decision: Decision) -> None:
        """What was decided is being loaded. A preempted request may keep blocks of what it had before."""
        self._before_load = list(self._spans)
        for span in (*decision.moved, *decision.settled):
            self.came(span, Provenance("blended", decision.ratio))

    def load_failed(self) -> None:
        self._spans = self._before_load

    def repaired(self) -> None:
        """All approximate KV was computed anew."""
        self._spans = [part for part in self._spans if part.provenance.is_exact]
