"""Asks all questions of a workload in one way of serving after the other."""

from collections.abc import Sequence
from typing import Any

from blendhub_tools.advice.judge import ANSWER_TOKENS, LOGPROBS, judge
from blendhub_tools.advice.outcomes import Outcome

from benchmarks.quality.measure import Asked, reported
from benchmarks.quality.real.workloads import RealCase
from benchmarks.timing import progress
from harness.engines import Answer, Engine


class Workload:
    """The cases of one workload, and full prefill's answers to their questions."""

    def __init__(self, name: str, cases: Sequence[RealCase], logprobs: int = LOGPROBS) -> None:
        self.name = name
        self.cases = cases
        self._logprobs = logprobs
        self._full: list[list[Answer]] = []

    def measure(self, engine: Engine, asked: Asked) -> Outcome:
        """Measure full prefill first. The first question of each case is asked alone, so that its time can be taken."""
        outcome = Outcome(asked.selector, asked.state, asked.ratio, workload=self.name)
        said = f"{self.name}: {asked.selector} at {asked.ratio:g}" + (f", {asked.state}" if asked.state else "")
        for number, case in enumerate(progress(self.cases, said)):
            engine.forget()
            answers = self._ask(engine, asked, number, case)
            if len(self._full) == number:
                self._full.append(answers)
            pairs = zip(self._full[number], answers, case.questions, strict=True)
            report = reported(answers[0])
            moved = report["moved_tokens"]
            share = report["recomputed_tokens"] / moved + asked.probed if moved else 1.0
            outcome.note([judge(full, ours, question.answered(full.tokens)) for full, ours, question in pairs], share)
            outcome.first_token_s.append(answers[0].first_token_s)
        return outcome

    def _ask(self, engine: Engine, asked: Asked, number: int, case: RealCase) -> list[Answer]:
        request = {"mode": asked.mode, "recompute_ratio": asked.ratio, "store": False, "logprobs": self._logprobs}
        each: list[dict[str, Any]] = [dict(request) for _ in case.questions]
        if len(self._full) > number:
            for one, full in zip(each, self._full[number], strict=True):
                one["forced"] = full.tokens
        for one in each[1:]:
            # These find the first one's KV in vLLM's own cache, unless they need another choice of tokens.
            one["settled"] = not asked.apart
        first, *others = ([*case.body, *question.tokens] for question in case.questions)
        answers = engine.ask(first, tokens=ANSWER_TOKENS, each=each[:1])
        return answers + (engine.ask(*others, tokens=ANSWER_TOKENS, each=each[1:]) if others else [])
