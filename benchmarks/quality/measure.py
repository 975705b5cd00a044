"""Asks the questions of all cases, in one way of serving after the other."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import msgspec

from benchmarks.quality.compared import Compared
from benchmarks.quality.workload import Case, Hole, Tokens
from blendhub.tools.advice.outcomes import Outcome
from harness.engines import Answer, Engine

Steps: TypeAlias = Callable[[Sequence[Any], str], Iterator[Any]]
"""Goes through a sequence and shows how far it is."""


class Answering(msgspec.Struct, frozen=True):
    """How answers are asked for."""

    tokens: int = 1
    """Most tokens of an answer."""
    stop: tuple[int, ...] = ()
    """Tokens that end one."""
    least_found: float = 0.0
    """The share of the documents' tokens that must be reused: otherwise the figures look better than they are."""

    def one(self, engine: Engine, prompt: Tokens, asked: dict[str, Any]) -> Answer:
        return self.all(engine, [prompt], asked)[0]

    def all(self, engine: Engine, prompts: Sequence[Tokens], asked: dict[str, Any]) -> list[Answer]:
        stop: dict[str, Any] = {"stop_token_ids": list(self.stop)} if self.stop else {}
        return engine.ask(*prompts, tokens=self.tokens, **stop, **asked)


def store(engine: Engine, visits: Sequence[Tokens], steps: Steps, hole: Hole | None = None) -> None:
    for visit in steps(visits, f"compute the documents{_without(hole)}"):
        engine.one(visit, mode="exact", **_namespace(hole))
        engine.forget()


class Asked(msgspec.Struct, frozen=True):
    """One way of serving."""

    selector: str
    ratio: float
    state: str = ""
    mode: str = "blend"
    hole: Hole | None = None
    apart: bool = False
    """Whether each question needs a separate blend."""
    probed: float = 0.0
    """What choosing costs: a share of what computing all moved tokens costs."""

    @classmethod
    def of(cls, compared: Compared, ratio: float, state: str, layers: int, hole: Hole | None = None) -> "Asked":
        return cls(
            compared.label,
            ratio,
            state,
            hole=hole,
            apart=compared.reads_question,
            probed=compared.probe_layers / layers,
        )


FULL = Asked("full", 1.0, mode="off")
REUSE = Asked("reuse", 0.0)


def measure(engine: Engine, cases: Sequence[Case], asked: Asked, answering: Answering, steps: Steps) -> Outcome:
    """Ask all questions to all cases this way. Of each case the first is asked alone, so that its time can be taken."""
    outcome = Outcome(asked.selector, asked.state, asked.ratio)
    said = f"{asked.selector} at {asked.ratio:g}" + (f", {asked.state}" if asked.state else "")
    for case in steps(cases, said):
        engine.forget()
        body = case.body
        first, *others = ([*body, *question.tokens] for question in case.questions)
        request = {"mode": asked.mode, "recompute_ratio": asked.ratio, "store": False, **_namespace(asked.hole)}
        leader = answering.one(engine, first, request)
        # The others find the first one's KV in vLLM's own cache, unless they need another choice of tokens.
        answers = [leader, *answering.all(engine, others, request | {"settled": not asked.apart})]
        moved = _checked(case, leader, asked, answering.least_found)
        table = [question.score(answer.tokens) for question, answer in zip(case.questions, answers, strict=True)]
        outcome.note(table, leader.report["recomputed_tokens"] / moved + asked.probed if moved else 1.0)
        outcome.first_token_s.append(leader.first_token_s)
    return outcome


def reported(answer: Answer) -> dict[str, Any]:
    """The report; ends the benchmark if there is none of reuse."""
    if "moved_tokens" not in answer.report:
        raise SystemExit(f"BlendHub serves this model without reuse: {answer.report.get('reason')}")
    return answer.report


def _checked(case: Case, answer: Answer, asked: Asked, least_found: float) -> int:
    """The number of tokens that were moved."""
    moved: int = reported(answer)["moved_tokens"]
    found, expected = moved + int(answer.report["exact_tokens"]), case.stored_tokens(asked.hole)
    if asked.mode != "off" and found < expected * least_found:
        raise SystemExit(f"{found} tokens were reused of {expected} that were stored: {answer.report}")
    return moved


def _namespace(hole: Hole | None) -> dict[str, Any]:
    """Where documents are stored: all of them, or all but one of each prompt."""
    return {"cache_salt": f"without the {hole}"} if hole else {}


def _without(hole: Hole | None) -> str:
    return f", without the {hole} ones" if hole else ""
