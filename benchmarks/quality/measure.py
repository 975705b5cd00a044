"""Asks all questions of a workload in one way of serving after the other, on a model that others made."""

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from blendhub_tools.advice import forced
from blendhub_tools.advice.judge import ANSWER_TOKENS, LOGPROBS, judge
from blendhub_tools.advice.outcomes import Outcome

from benchmarks.quality.serving import PLAIN, Serving, reported
from benchmarks.quality.workloads import LONGEST, WORKLOADS, Case, Chat, Tokens, first_cases, visits
from benchmarks.timing import progress
from blendhub.core.layout import MIN_DONOR_CONTEXT
from blendhub.vllm.settings import Settings
from harness.engines import Answer, Engine

RATIOS = (0.05, 0.15, 0.3)
OPTIONS: dict[str, Any] = PLAIN | forced.OPTIONS


class Selector(msgspec.Struct, frozen=True):
    name: str
    options: dict[str, Any] = {}
    reads_question: bool = False
    """Whether its picks depend on the question, so that each question needs a separate blend."""
    probe_layers: float = 0.0
    """What it computes before it picks: the share of the tokens times the number of layers."""


SELECTORS = (
    Selector("attended", reads_question=True),
    Selector("hkvd", probe_layers=0.25),
    Selector("first_k", {"k": 0}),
)


class Way(msgspec.Struct, frozen=True):
    """One way of serving."""

    selector: str
    ratio: float
    state: str = ""
    mode: str = "blend"
    apart: bool = False
    """Whether each question needs a separate blend."""
    probed: float = 0.0
    """What choosing costs: a share of what computing all moved tokens costs."""


FULL = Way("full", 1.0, mode="off")
COLD = Way("reuse", 0.0)
"""What all ways are compared with: text is reused as it was computed once, though it may have stood first."""


def run(model: Path, questions: int, workloads: Sequence[str] = tuple(WORKLOADS)) -> Iterator[Outcome]:
    from transformers import AutoTokenizer

    chat = Chat(AutoTokenizer.from_pretrained(model))
    for name in workloads:
        cases = first_cases(name, chat, questions)
        before, steady = visits(cases), visits(cases, until_deep=True)
        with tempfile.TemporaryDirectory(prefix="blendhub-quality-") as place:
            serving = Serving(str(model), Path(place), sum(map(len, steady)), max_model_len=LONGEST, **OPTIONS)
            workload = Workload(name, cases)
            with serving.storing() as keeper:
                workload.store(keeper, before, mode="exact")
                yield workload.measure(keeper, FULL)
                yield workload.measure(keeper, COLD)
            with serving.storing(policy={"min_donor_context": MIN_DONOR_CONTEXT}) as keeper:
                workload.store(keeper, steady)
                for selector in SELECTORS:
                    with serving.choosing({"name": selector.name, "options": selector.options}) as engine:
                        apart, probed = selector.reads_question, selector.probe_layers / serving.layers
                        if selector.name == Settings().selector.name:
                            yield workload.measure(engine, Way(selector.name, 0.0))
                            yield workload.measure(engine, Way(selector.name, 0.15, "settled", probed=probed))
                        for ratio in RATIOS:
                            yield workload.measure(engine, Way(selector.name, ratio, apart=apart, probed=probed))


class Workload:
    """The cases of one workload, and full prefill's answers to their questions."""

    def __init__(self, name: str, cases: Sequence[Case]) -> None:
        self.name = name
        self.cases = cases
        self._full: list[list[Answer]] = []
        self._times_computed = 0.0

    def store(self, engine: Engine, visits: Sequence[Tokens], **asked: Any) -> None:
        """Have the text of the cases computed as these visits do it."""
        computed = 0
        for prompt in progress(visits, f"{self.name}: compute the documents"):
            computed += len(prompt) - engine.one(prompt, **asked).cached
            engine.forget()
        documents = {tuple(piece) for case in self.cases for piece in case.pieces}
        self._times_computed = computed / sum(map(len, documents))

    def measure(self, engine: Engine, way: Way) -> Outcome:
        """Measure full prefill first. The first question of each case is asked alone, so that its time can be taken."""
        outcome = Outcome(way.selector, way.state, way.ratio, workload=self.name, times_computed=self._times_computed)
        for number, case in enumerate(progress(self.cases, f"{self.name}: {way.selector} {way.ratio:g} {way.state}")):
            engine.forget()
            answers = self._ask(engine, way, number, case)
            if len(self._full) == number:
                self._full.append(answers)
            pairs = zip(self._full[number], answers, case.questions, strict=True)
            report = reported(answers[0])
            moved = report["moved_tokens"]
            share = report["recomputed_tokens"] / moved + way.probed if moved else 1.0
            outcome.note([judge(full, ours, question.answered(full.tokens)) for full, ours, question in pairs], share)
            outcome.first_token_s.append(answers[0].first_token_s)
        return outcome

    def _ask(self, engine: Engine, way: Way, number: int, case: Case) -> list[Answer]:
        request = {"mode": way.mode, "recompute_ratio": way.ratio, "store": False, "logprobs": LOGPROBS}
        each: list[dict[str, Any]] = [dict(request) for _ in case.questions]
        if len(self._full) > number:
            for asked, full in zip(each, self._full[number], strict=True):
                asked["forced"] = full.tokens
        for asked in each[1:]:
            # These find the first one's KV in vLLM's own cache, unless they need another choice of tokens.
            asked["settled"] = not way.apart
        first, *others = ([*case.body, *question.tokens] for question in case.questions)
        answers = engine.ask(first, tokens=ANSWER_TOKENS, each=each[:1])
        return answers + (engine.ask(*others, tokens=ANSWER_TOKENS, each=each[1:]) if others else [])
