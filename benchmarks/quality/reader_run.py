"""``make quality``: the experiment on the reader."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from benchmarks.quality import oracle, reader_cases
from benchmarks.quality.compared import BAR_RATIOS, DEFAULT_RATIOS, SELECTORS, Compared
from benchmarks.quality.experiment import Experiment, Plan, Shown
from benchmarks.quality.found import Found
from benchmarks.quality.measure import Answering
from benchmarks.quality.reader.task import STRATA
from benchmarks.quality.serving import READER, Serving, folder
from benchmarks.quality.workload import HOLES
from blendhub.tools.advice.outcomes import Outcome
from blendhub.vllm.settings import Settings


class Size(msgspec.Struct, frozen=True):
    questions: int
    """The number of questions in each stratum."""
    some: int
    """The number of questions in each stratum, where all of them would take long."""
    ratios: tuple[float, ...] = DEFAULT_RATIOS


WHOLE = Size(256, 64)
QUICK = Size(16, 16, BAR_RATIOS)


def run(checkpoint: Path, size: Size, selectors: Sequence[Compared] = SELECTORS) -> Iterator[Outcome]:
    with folder() as place, Shown() as shown:
        made = list(shown.steps(reader_cases.make_prompts(size.questions, READER["block_size"]), "choose prompts"))
        prompts, cases = [prompt for prompt, _ in made], [case for _, case in made]
        answers = place / "answers.json"
        oracle.write_answers(prompts, answers)
        plan = Plan(
            cases=cases,
            some=cases[: -(-len(cases) * size.some // size.questions)],
            holes=True,
            selectors=[*selectors, oracle.compared(answers)],
            default=next(one for one in SELECTORS if one.label == Settings().selector.name),
            ratios=size.ratios,
            answering=Answering(least_found=0.95),
            headers=reader_cases.headers,
        )
        tokens = sum(len(case.body) for case in cases)
        serving = Serving(str(checkpoint), place, tokens * (1 + len(HOLES)), **READER)
        yield from Experiment(plan, serving, shown.steps).outcomes()


def found(outcomes: Sequence[Outcome]) -> Found:
    facts = [number for number, stratum in enumerate(STRATA) if stratum != "counting"]
    return Found(outcomes, STRATA, facts, "all but counting", Settings().selector.name)
