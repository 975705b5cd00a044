"""One measure of all workloads, a column each, and the figures that have names."""

import statistics
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
from blendhub_tools.advice.judge import FIRST, KL, RIGHT, SURE_FIRST
from blendhub_tools.advice.outcomes import Outcome, accuracy

from benchmarks.quality.found import Found
from benchmarks.quality.measure import Compared
from benchmarks.quality.reader.cases import READER
from benchmarks.report import Row, missing_row
from blendhub.vllm.settings import Settings

BARS = {0.05: 0.40, 0.15: 0.70, 0.3: 0.90}


def by_workload(outcomes: Sequence[Outcome], measure: int, relative: bool = False) -> Found:
    """Ways of serving that every workload was asked in. ``relative``: to what reuse loses, so that all count alike."""
    workloads = list(dict.fromkeys(one.workload for one in outcomes))
    together: dict[tuple[str, str, float], list[Outcome]] = {}
    for one in outcomes:
        together.setdefault(one.key, []).append(one)
    lost = {one.workload: -accuracy(one)[measure] for one in outcomes if one.selector == "reuse"}
    merged = [
        _merged(those, measure, [lost[one.workload] if relative else 1.0 for one in those])
        for those in together.values()
        if len(those) == len(workloads)
    ]
    asked = np.sum(merged[0].asked, 0)
    main = [number for number in range(len(workloads)) if asked[number]]
    return Found(merged, workloads, main, Settings().selector.name)


def won_back(outcomes: Sequence[Outcome]) -> Found:
    """The share of the KL of the first token that reuse loses."""
    return by_workload(outcomes, KL, relative=True)


def of_real_model(outcomes: Sequence[Outcome]) -> list[Outcome]:
    return [one for one in outcomes if one.workload != READER]


def rows(measured: Sequence[Outcome], selectors: Sequence[Compared]) -> list[Row]:
    outcomes = of_real_model(measured)
    found = won_back(outcomes)
    return [
        *_of_reuse(outcomes),
        *_of_the_default(found),
        *_agreement(outcomes, found.default),
        _lead(found, [one.name for one in selectors]),
        *_of_states(outcomes, found.default),
        *_of_selectors(found),
        *_by_workload(found),
        *_of_the_reader([one for one in measured if one.workload == READER], found.default),
    ]


def _of_reuse(outcomes: Sequence[Outcome]) -> Iterator[Row]:
    measures: list[tuple[int, str, str, str, Literal["lower", "higher"]]] = [
        (KL, "kl", "KL of the first token", "nats", "lower"),
        (FIRST, "first", "the same first token", "share", "higher"),
    ]
    for measure, id, what, unit, better in measures:
        found = by_workload(outcomes, measure)
        for column, name in enumerate(found.columns):
            value = float(abs(accuracy(found.reuse)[column]))
            said = f"{name}: {what}, nothing recomputed"
            yield Row(f"real_{name}_reuse_{id}", said, value, unit, None, better, None, None)
    right = by_workload(outcomes, RIGHT)
    for column in right.main:
        of_all = sum(case[column] for case in right.full.asked) / _questions(outcomes, right.columns[column])
        yield row(f"real_{right.columns[column]}_full_right", "right answers of full prefill", of_all)


def _of_the_default(found: Found) -> Iterator[Row]:
    for ratio, bar in BARS.items():
        one = found.get(found.default, ratio)
        compared = found.compared(one) if one else None
        what = f"{found.default}: share won back of the KL that reuse loses, at {ratio:g}: mean of all workloads"
        share = compared.share(found.main) if compared else None
        spread = compared.interval(found.main) if compared else None
        yield row(f"real_recovered_{round(ratio * 100):02d}", what, share, bar, spread=spread)
        if compared and ratio == 0.15:
            shares = [compared.share([column]) or 0.0 for column in found.main]
            worst = int(np.argmin(shares))
            what = f"{found.default}: the worst of these, {found.columns[found.main[worst]]}"
            spread = compared.interval([found.main[worst]])
            yield row("real_recovered_15_worst", what, shares[worst], 0.55, spread=spread)


def _agreement(outcomes: Sequence[Outcome], default: str) -> Iterator[Row]:
    for id, measure, what in (
        ("real_first_token_15", SURE_FIRST, "the same first token where full prefill is surer than 0.5"),
        ("real_accuracy_15", RIGHT, "right answers where full prefill's is right"),
    ):
        found = by_workload(outcomes, measure)
        one = found.get(default, 0.15)
        value = float(accuracy(one)[found.main].mean()) if one and found.main else None
        yield row(id, f"{default} at 0.15: {what}", value, 0.97)


def _lead(found: Found, selectors: Sequence[str]) -> Row:
    leads = [
        theirs - ours
        for ratio in BARS
        for name in selectors
        for column in found.main
        if name != found.default
        and (ours := _share(found, found.default, ratio, column)) is not None
        and (theirs := _share(found, name, ratio, column)) is not None
    ]
    what = f"by how much another selector wins back more than {found.default} on any workload: the most"
    return row("real_default_wins", what, max(leads, default=None), 0.03, "lower")


def _of_states(outcomes: Sequence[Outcome], default: str) -> Iterator[Row]:
    """How the default fares after more than one visit, on the workloads that have such a state."""
    settled, cold = _in_state(outcomes, default, "settled")
    what = f"{default} at 0.15: share lost where all questions but one find a blend that was made for that one"
    lost = None if cold is None or settled is None else cold - settled
    yield row("real_settled_15", what, lost, 0.15, "lower")
    warm, cold = _in_state(outcomes, default, "warm")
    what = f"{default} at 0.15: share won back where each document was computed behind two others, {cold or 0:.2f} cold"
    yield row("real_warm_15", what, warm)


def _in_state(outcomes: Sequence[Outcome], default: str, state: str) -> tuple[float | None, float | None]:
    """The mean share won back at 0.15 in this state and cold, of the workloads that were asked in it."""
    asked = {one.workload for one in outcomes if one.state == state}
    if not asked:
        return None, None
    found = won_back([one for one in outcomes if one.workload in asked])
    both = [found.all.get((default, name, 0.15)) for name in (state, "")]
    there, cold = (found.compared(one).share(found.main) if one else None for one in both)
    return there, cold


def _of_selectors(found: Found) -> Iterator[Row]:
    full_s = statistics.median(found.full.first_token_s)
    for name in found.selectors:
        for one in found.curve(name):
            what = f"{name}: share won back, {statistics.mean(one.recomputed):.0%} of the moved text computed, "
            what += f"first token after {statistics.median(one.first_token_s) / full_s:.2f} of full prefill's time"
            compared = found.compared(one)
            spread = compared.interval(found.main)
            yield row(f"real_{name}_{round(one.ratio * 100):02d}", what, compared.share(found.main), spread=spread)


def _by_workload(found: Found) -> Iterator[Row]:
    for one in found.all.values():
        if one.selector not in ("full", "reuse"):
            for column in found.main:
                compared = found.compared(one)
                id = "_".join(["real", found.columns[column], one.selector, f"{one.ratio * 100:02.0f}"])
                id += f"_{one.state}" if one.state else ""
                what = f"{f'{one.selector} {one.state}'.strip()}: share won back of the KL, {found.columns[column]}"
                yield row(id, what, compared.share([column]), spread=compared.interval([column]))


def _of_the_reader(outcomes: Sequence[Outcome], default: str) -> Iterator[Row]:
    if outcomes:
        found = won_back(outcomes)
        what = "a small model that was trained for this repository: share won back of the KL at 0.15, {}"
        shares = {name: _share(found, name, 0.15, 0) for name in found.selectors}
        for name, share in shares.items():
            yield row(f"reader_{name}_15", what.format(name), share, shares.get("first_k") if name == default else None)


def row(
    id: str,
    what: str,
    value: float | None,
    bar: float | None = None,
    better: Literal["higher", "lower"] = "higher",
    spread: tuple[float, float] | None = None,
) -> Row:
    if value is None:
        return missing_row(id, f"{what}: not measured, or reuse loses next to nothing", "share", bar, better)
    value = float(value)
    ok = None if bar is None else value >= bar if better == "higher" else value <= bar
    return Row(id, what, value, "share", bar, better, ok, spread)


def _share(found: Found, label: str, ratio: float, column: int) -> float | None:
    one = found.get(label, ratio)
    return found.compared(one).share([column]) if one else None


def _questions(outcomes: Sequence[Outcome], workload: str) -> int:
    return next(sum(case[KL] for case in one.asked) for one in outcomes if one.workload == workload)


def _merged(those: Sequence[Outcome], measure: int, scale: Sequence[float]) -> Outcome:
    """One outcome whose columns are workloads."""
    scores, asked = [], []
    for column, (one, by) in enumerate(zip(those, scale, strict=True)):
        for score, questions in zip(one.scores, one.asked, strict=True):
            scores.append([score[measure] / by if number == column else 0.0 for number in range(len(those))])
            asked.append([questions[measure] if number == column else 0 for number in range(len(those))])
    seconds = [second for one in those for second in one.first_token_s]
    return Outcome(*those[0].key, scores, asked, [share for one in those for share in one.recomputed], seconds)
