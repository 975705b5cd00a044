"""Audits in service, on a model whose answers mean something: harder traffic is noticed, and answered well."""

import random

import pytest

from benchmarks.quality.reader import CHECKPOINT
from benchmarks.quality.reader.task import Shape, headers, make_prompt
from benchmarks.quality.serving import PLAIN
from benchmarks.quality.workload import Case, make_visits
from harness.engines import Engine

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]

TARGET = 0.95
SETTINGS = {
    "hub": {"arena_gib": 1.5, "metrics": ""},
    "policy": {"max_recompute_share": 1.0},
    # The default one learns from audits, and holds its agreement here without a higher ratio.
    "selector": {"name": "first_k", "options": {"k": 0}},
    "audit_share": 1.0,
    "hold_agreement": TARGET,
    "expected_agreement": TARGET,
    "max_ratio": 1.0,
    "lookup_timeout_s": 30.0,
}
SHAPE = Shape((4, 5), (100, 130), (400, 700), (2, 3), (1, 3), (0, 1), 0.6)
AT_ONCE = 8


def questions(stratum: str, seed: int, number: int) -> tuple[list[Case], list[list[int]]]:
    """Documents, and so many prompts of them that ask for what ``stratum`` says."""
    cases, prompts = [], []
    while len(prompts) < number:
        seed += 1
        made = make_prompt(seed, "test", SHAPE)
        case = Case(made.header, made.documents, [])
        cases.append(case)
        prompts += [[*case.body, *one.tokens] for one in made.questions if one.stratum == stratum]
    random.Random(seed).shuffle(prompts)
    return cases, prompts[:number]


def asked(engine: Engine, prompts: list[list[int]]) -> list[tuple[float, bool]]:
    """For each prompt the share of the moved text that was recomputed, and whether the first token agreed."""
    outcomes = []
    for first in range(0, len(prompts), AT_ONCE):
        engine.forget()
        for answer in engine.ask(*prompts[first : first + AT_ONCE], store=False):
            report = answer.report
            share = report["recomputed_tokens"] / report["moved_tokens"]
            outcomes.append((round(share, 2), report["audit"]["agrees"]))
    return outcomes


def agreement(outcomes: list[tuple[float, bool]]) -> float:
    return sum(agrees for _, agrees in outcomes) / len(outcomes)


def test_traffic_that_begins_to_depend_on_context_is_noticed_and_agreement_comes_back():
    easy, plain = questions("plain", 1000, 64)
    hard, cross = questions("cross", 5000, 280)
    with Engine(CHECKPOINT, SETTINGS, **PLAIN) as engine:
        for visit in make_visits([*easy, *hard], headers(), 2048):
            engine.one(visit, mode="exact")
        assert agreement(asked(engine, plain)) >= TARGET
        assert "fewer audited requests agree" not in engine.log
        after = asked(engine, cross[:160])
        assert "fewer audited requests agree" in engine.log, "not noticed within 160 audits"
        assert agreement(after[:64]) < TARGET, "this traffic is not harder: nothing is tested"
        last = asked(engine, cross[160:])[-80:]
        # The others look at the ratio below, whether it would do.
        served = max(share for share, _ in last)
        held = [one for one in last if one[0] > 0.75 * served]
        assert len(held) >= 20 and agreement(held) >= TARGET
