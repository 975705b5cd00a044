"""The selectors that are compared, and what every way of serving needs: stored documents, and reports of reuse."""

from collections.abc import Sequence
from typing import Any

import msgspec

from benchmarks.quality.workload import Tokens
from benchmarks.timing import progress
from harness.engines import Answer, Engine


class Compared(msgspec.Struct, frozen=True):
    name: str
    options: dict[str, Any] = {}
    reads_question: bool = False
    """Whether its picks depend on the question, so that each question needs a separate blend."""
    probe_layers: float = 0.0
    """What it computes before it picks: the share of the tokens times the number of layers."""

    @property
    def choice(self) -> dict[str, Any]:
        return {"name": self.name, "options": self.options}


SELECTORS = (
    Compared("attended", reads_question=True),
    Compared("hkvd", probe_layers=0.25),
    Compared("first_k", {"k": 0}),
)


def store(engine: Engine, visits: Sequence[Tokens]) -> None:
    for visit in progress(visits, "compute the documents"):
        engine.one(visit, mode="exact")
        engine.forget()


class Asked(msgspec.Struct, frozen=True):
    """One way of serving."""

    selector: str
    ratio: float
    state: str = ""
    mode: str = "blend"
    apart: bool = False
    """Whether each question needs a separate blend."""
    probed: float = 0.0
    """What choosing costs: a share of what computing all moved tokens costs."""

    @classmethod
    def of(cls, compared: Compared, ratio: float, state: str, layers: int) -> "Asked":
        probed = compared.probe_layers / layers
        return cls(compared.name, ratio, state, apart=compared.reads_question, probed=probed)


FULL = Asked("full", 1.0, mode="off")
REUSE = Asked("reuse", 0.0)


def reported(answer: Answer) -> dict[str, Any]:
    """The report; ends the benchmark if there is none of reuse."""
    if "moved_tokens" not in answer.report:
        raise SystemExit(f"BlendHub serves this model without reuse: {answer.report.get('reason')}")
    return answer.report
