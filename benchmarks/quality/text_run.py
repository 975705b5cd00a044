"""The experiment on any model and any file of questions to several documents."""

from collections.abc import Iterator, Sequence
from itertools import repeat
from pathlib import Path

from benchmarks.quality.compared import BAR_RATIOS, DEFAULT_RATIOS, SELECTORS, Compared
from benchmarks.quality.experiment import Experiment, Plan, Shown
from benchmarks.quality.found import Found
from benchmarks.quality.measure import Answering
from benchmarks.quality.serving import Serving, folder, usual_dtype
from benchmarks.quality.text_cases import Writer
from benchmarks.quality.workload import Case
from blendhub.tools.advice.outcomes import Outcome
from blendhub.tools.advice.questions import read_questions
from blendhub.vllm.settings import Settings

COLUMNS = ("F1", "exact match")
ANSWER_TOKENS = 32


def run(
    model: str, data: Path, until: int | None, quick: bool, selectors: Sequence[Compared] = SELECTORS
) -> Iterator[Outcome]:
    from transformers import AutoTokenizer

    writer = Writer(AutoTokenizer.from_pretrained(model), COLUMNS)
    cases = [writer.case(one) for one in read_questions(data, until)]
    with folder() as place, Shown() as shown:
        tokens = sum(len(case.body) for case in cases)
        serving = Serving(model, place, tokens, dtype=usual_dtype(), max_model_len=longest(cases))
        plan = Plan(
            cases=cases,
            some=cases,
            holes=False,
            selectors=selectors,
            default=next(one for one in SELECTORS if one.label == Settings().selector.name),
            ratios=BAR_RATIOS if quick else DEFAULT_RATIOS,
            answering=Answering(ANSWER_TOKENS, writer.stop),
            headers=lambda: repeat(writer.header),
        )
        yield from Experiment(plan, serving, shown.steps).outcomes()


def found(outcomes: Sequence[Outcome]) -> Found:
    return Found(outcomes, COLUMNS, [0], "F1", Settings().selector.name)


def longest(cases: Sequence[Case], answer_tokens: int = ANSWER_TOKENS) -> int:
    """The most tokens of a prompt and its answer."""
    return max(len(case.body) + len(question.tokens) for case in cases for question in case.questions) + answer_tokens
