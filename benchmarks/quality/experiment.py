"""The experiment: documents are computed, and prompts of them asked in every way."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.quality.compared import BAR_RATIOS, Compared
from benchmarks.quality.measure import FULL, REUSE, Answering, Asked, Steps, measure, store
from benchmarks.quality.serving import Serving
from benchmarks.quality.workload import HOLES, Case, Hole, Tokens, make_visits
from blendhub.tools.advice.outcomes import Outcome
from harness.engines import Engine


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    cases: Sequence[Case]
    some: Sequence[Case]
    """The first of the cases, for measurements that would take long with all."""
    holes: bool
    """Whether the default selector is also asked about prompts with a hole."""
    selectors: Sequence[Compared]
    default: Compared
    ratios: Sequence[float]
    answering: Answering
    headers: Callable[[], Iterator[Tokens]]
    """Makes the headers behind which documents are computed."""


class Experiment:
    """One run; ``outcomes`` yields each as soon as it is measured."""

    def __init__(self, plan: Plan, serving: Serving, steps: Steps) -> None:
        self._plan = plan
        self._serving = serving
        self._steps = steps

    def outcomes(self) -> Iterator[Outcome]:
        plan = self._plan
        with self._serving.storing() as keeper:
            store(keeper, self._visits(plan.cases), self._steps)
            yield self._measured(keeper, FULL, plan.cases)
            yield self._measured(keeper, REUSE, plan.cases)
            for compared in plan.selectors:
                with self._serving.choosing(compared) as engine:
                    yield from self._ratios(engine, compared)
                    yield from self._behind_the_first(engine, compared)
            if plan.holes:
                yield from self._with_holes(keeper)

    def _behind_the_first(self, engine: Engine, compared: Compared) -> Iterator[Outcome]:
        """By default: all questions of a prompt with the tokens that were picked for its first, which are settled."""
        if compared is self._plan.default and compared.reads_question:
            asked = Asked.of(compared, 0.15, "settled", self._serving.layers)
            yield self._measured(engine, msgspec.structs.replace(asked, apart=False), self._plan.cases)

    def _with_holes(self, keeper: Engine) -> Iterator[Outcome]:
        plan = self._plan
        for hole in HOLES:
            store(keeper, self._visits(plan.some, hole), self._steps, hole)
            asked = msgspec.structs.replace(REUSE, state=f"hole {hole}", hole=hole)
            yield self._measured(keeper, asked, plan.some)
        with self._serving.choosing(plan.default) as engine:
            for hole in HOLES:
                asked = Asked.of(plan.default, 0.15, f"hole {hole}", self._serving.layers, hole)
                yield self._measured(engine, asked, plan.some)

    def _ratios(self, engine: Engine, compared: Compared) -> Iterator[Outcome]:
        for ratio in self._plan.ratios:
            # A blend for each question takes long: beside the ratios that have bars, some show the curve.
            few = compared.reads_question and ratio not in BAR_RATIOS
            asked = Asked.of(compared, ratio, "", self._serving.layers)
            yield self._measured(engine, asked, self._plan.some if few else self._plan.cases)

    def _measured(self, engine: Engine, asked: Asked, cases: Sequence[Case]) -> Outcome:
        return measure(engine, cases, asked, self._plan.answering, self._steps)

    def _visits(self, cases: Sequence[Case], hole: Hole | None = None) -> list[Tokens]:
        """The prompts in which the documents of these cases are computed before."""
        return make_visits(cases, self._plan.headers(), self._serving.longest, hole)


class Shown:
    """A bar for each part of the run, on stderr."""

    def __init__(self) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=Console(stderr=True))

    def __enter__(self) -> "Shown":
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def steps(self, those: Iterable[Any], what: str) -> Iterator[Any]:
        length = len(those) if isinstance(those, Sequence) else None
        yield from self._progress.track(those, total=length, description=what)
