"""The same prompts served three ways, in turn, so that whatever else the machine does meets all ways alike."""

from collections.abc import Iterator
from typing import Any

import msgspec
from rich.progress import Progress

from blendhub.plan import Span
from engine_harness import KV, Answer, Engine, deviation
from examples.demo.fates import Fate, Stretch, paint
from examples.demo.workload import Tokens, Workload


class Way(msgspec.Struct, frozen=True):
    title: str
    mode: str
    """What each request asks of BlendHub."""
    system_is_cached: bool
    """Whether vLLM's own cache holds the system prompt, as it does on a server with other users."""


WAYS = {
    "full": Way("full prefill", "off", False),
    "exact": Way("exact prefix only", "exact", True),
    "blended": Way("blended", "blend", True),
}


class Measured(msgspec.Struct):
    """One prompt, served one way in every round."""

    prompt: int
    way: str
    plan: list[Stretch]
    report: dict[str, Any]
    """What the response said about reuse."""
    kv_deviation: float
    """Relative Frobenius norm of the difference to full prefill's KV, over the prompt."""
    first_token_s: list[float] = []


def run(engine: Engine, workload: Workload, n_prompts: int, n_rounds: int, progress: Progress) -> list[Measured]:
    for prompt in progress.track(workload.earlier(), description="show it every document once"):
        engine.one(prompt)
    another, *prompts = workload.later(1 + n_prompts)
    # What happens for the first time takes longer: code is compiled, memory touched.
    for way in progress.track(WAYS.values(), description="warm up"):
        _serve(engine, workload.system, another, way)
    measured: dict[tuple[int, str], Measured] = {}
    full_kv: KV | None = None
    turns = list(_turns(n_prompts, n_rounds))
    for round, number, name in progress.track(turns, description="serve prompts in three ways"):
        prompt = prompts[number]
        answer = _serve(engine, workload.system, prompt, WAYS[name])
        if round == 0:
            kv = answer.kv(len(prompt))
            full_kv = kv if full_kv is None or name == "full" else full_kv
            plan = plan_of(len(prompt), answer.report)
            measured[number, name] = Measured(number + 1, name, plan, answer.report, deviation(kv, full_kv))
        measured[number, name].first_token_s.append(answer.first_token_s)
    return list(measured.values())


def plan_of(n_tokens: int, report: dict[str, Any]) -> list[Stretch]:
    """What became of each token, from what the response said."""
    spans = msgspec.convert(report.get("spans", {}), dict[str, list[Span]])
    fates = {"exact": Fate.EXACT, "moved": Fate.MOVED, "recomputed": Fate.RECOMPUTED, "holes": Fate.HOLE}
    return paint(n_tokens, report["engine_tokens"], {fate: spans.get(name, []) for name, fate in fates.items()})


def _turns(n_prompts: int, n_rounds: int) -> Iterator[tuple[int, int, str]]:
    """Round, prompt and way. Each round begins with another way; the first one with full prefill, as a reference."""
    names = list(WAYS)
    for round in range(n_rounds):
        begin = round % len(names)
        for number in range(n_prompts):
            yield from ((round, number, name) for name in names[begin:] + names[:begin])


def _serve(engine: Engine, system: Tokens, prompt: Tokens, way: Way) -> Answer:
    engine.forget()
    if way.system_is_cached:
        engine.one(system, mode="off", store=False)
    return engine.one(prompt, mode=way.mode, store=False, explain=True)
