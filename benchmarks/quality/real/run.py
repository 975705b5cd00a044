"""``make quality``: the experiment on a model, texts and tasks that others made."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
from blendhub_tools.advice import forced
from blendhub_tools.advice.judge import LOGPROBS
from blendhub_tools.advice.outcomes import Outcome

from benchmarks.quality.measure import FULL, REUSE, SELECTORS, Asked, Compared, store
from benchmarks.quality.reader import CHECKPOINT
from benchmarks.quality.reader.cases import READER, reader_cases
from benchmarks.quality.reader.task import headers
from benchmarks.quality.real.chat import Chat
from benchmarks.quality.real.measure import Workload
from benchmarks.quality.real.workloads import LONGEST, WORKLOADS, RealCase, again, earlier
from benchmarks.quality.serving import PLAIN, Serving, Shape, folder
from benchmarks.quality.workload import Tokens
from blendhub.vllm.settings import Settings
from harness.engines.real_model import make_real_model

RATIOS = (0.05, 0.15, 0.3)
OPTIONS: dict[str, Any] = PLAIN | forced.OPTIONS

ALL = (*WORKLOADS, READER)
MANY, FEW = 200, 8
"""Questions of each workload."""


def run(questions: int, selectors: Sequence[Compared] = SELECTORS, workloads: Sequence[str] = ALL) -> Iterator[Outcome]:
    for name in workloads:
        model, longest, cases, visits, more = subject(name, questions)
        with folder() as place:
            serving = Serving(model, place, sum(map(len, visits + more)), max_model_len=longest, **OPTIONS)
            with serving.storing() as keeper:
                workload = Workload(name, cases, min(LOGPROBS, serving.vocabulary))
                store(keeper, visits)
                yield workload.measure(keeper, FULL)
                yield workload.measure(keeper, REUSE)
                for compared in selectors:
                    with serving.choosing(compared) as engine:
                        for ratio in RATIOS:
                            yield workload.measure(engine, Asked.of(compared, ratio, "", serving.layers))
                        if compared.name == Settings().selector.name and len(cases[0].questions) > 1:
                            asked = Asked.of(compared, 0.15, "settled", serving.layers)
                            yield workload.measure(engine, msgspec.structs.replace(asked, apart=False))
                # Last, as it stores more. The default comes first.
                if more:
                    store(keeper, more)
                    with serving.choosing(selectors[0]) as engine:
                        yield workload.measure(engine, Asked.of(selectors[0], 0.15, "warm", serving.layers))


class _Subject(NamedTuple):
    model: str
    longest: int
    """The most tokens of a prompt."""
    cases: list[RealCase]
    visits: list[Tokens]
    """The prompts in which the text was computed before."""
    more: list[Tokens]
    """Prompts in which it is computed once more, before a last measurement."""


def subject(workload: str, questions: int) -> _Subject:
    return _of_reader(questions) if workload == READER else _of_real(workload, questions)


def _of_real(workload: str, questions: int) -> _Subject:
    from transformers import AutoTokenizer

    model = str(make_real_model())
    cases = first_cases(WORKLOADS[workload](Chat(AutoTokenizer.from_pretrained(model)), "test"), questions)
    return _Subject(model, LONGEST, cases, earlier(cases), again(cases))


def _of_reader(questions: int) -> _Subject:
    model, cases = str(CHECKPOINT), first_cases(reader_cases(), questions)
    longest = Shape(model).longest
    return _Subject(model, longest, cases, earlier(cases, headers(), longest), [])


def first_cases(cases: Iterator[RealCase], questions: int) -> list[RealCase]:
    """Enough cases for so many questions, and at least two: each case's text is computed among that of another one."""
    chosen: list[RealCase] = []
    for case in cases:
        if len(chosen) >= 2 and sum(len(one.questions) for one in chosen) >= questions:
            break
        chosen.append(case)
    return chosen
