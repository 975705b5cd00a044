"""The rows that sum up what reuse loses, and what each selector wins back of it."""

import statistics
from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np
from blendhub_tools.advice.judge import FIRST, KL, RIGHT, SURE_FIRST
from blendhub_tools.advice.outcomes import RESAMPLES, Outcome, accuracy

from benchmarks.quality.measure import SELECTORS
from benchmarks.report import Row, row
from blendhub.vllm.settings import Settings

BARS = {0.0: 0.40, 0.05: 0.70, 0.15: 0.85, 0.3: None}
DEFAULT = Settings().selector.name


def rows(outcomes: Sequence[Outcome]) -> Iterator[Row]:
    """All workloads were asked in the same ways."""
    ways: dict[tuple[str, str, float], list[Outcome]] = {}
    for outcome in outcomes:
        ways.setdefault(outcome.key, []).append(outcome)
    full, reuse = ways.pop(("full", "", 1.0)), ways.pop(("reuse", "", 0.0))
    for cold in reuse:
        name, (lost, same) = cold.workload, accuracy(cold)[[KL, FIRST]]
        what = f"{name}: computed once, at any place, nothing recomputed"
        yield row(f"real_{name}_reuse_kl", f"{what}: KL of the first token", "nats", [abs(lost)], better="lower")
        yield row(f"real_{name}_reuse_first", f"{what}: the same first token", "share", [same])
        times = max(outcome.times_computed for outcome in outcomes if outcome.workload == name)
        what = f"{name}: how often each document was computed until all could move"
        yield row(f"steady_{name}_computed", what, "times", [times], better="lower")
    for exact in full:
        asked = np.sum(exact.asked, 0)
        share = [asked[RIGHT] / asked[KL]] if asked[RIGHT] else []  # of some tasks, no right answer is known
        yield row(f"real_{exact.workload}_full_right", "right answers of full prefill", "share", share)
    full_s = statistics.median(second for exact in full for second in exact.first_token_s)
    for (selector, state, ratio), ours in ways.items():
        percent = f"{100 * ratio:02.0f}"
        for one, cold in zip(ours, reuse, strict=True):
            id = "_".join(filter(None, ["real", one.workload, selector, percent, state]))
            yield _won(id, f"{f'{selector} {state}'.strip()}: share won back of the KL, {one.workload}", [one], [cold])
        if not state:
            computed = statistics.mean(share for one in ours for share in one.recomputed)
            seconds = statistics.median(second for one in ours for second in one.first_token_s)
            what = f"{selector}: share won back, {computed:.0%} of the moved text computed, "
            what += f"first token after {seconds / full_s:.2f} of full prefill's time"
            yield _won(f"real_{selector}_{percent}", what, ours, reuse)
    yield from _of_the_default(ways, reuse)


def _of_the_default(ways: dict[tuple[str, str, float], list[Outcome]], reuse: Sequence[Outcome]) -> Iterator[Row]:
    for ratio, bar in BARS.items():
        what = f"{DEFAULT}: share won back of the KL that cold reuse loses, at {ratio:g}: mean of all workloads"
        yield _won(f"steady_{100 * ratio:02.0f}", what, ways[DEFAULT, "", ratio], reuse, bar)
    ours, settled = (ways[DEFAULT, state, 0.15] for state in ("", "settled"))
    worst = min(zip(ours, reuse, strict=True), key=lambda pair: shares([pair[0]], [pair[1]])[0])
    what = f"{DEFAULT}: the worst of these at 0.15, {worst[0].workload}"
    yield _won("steady_15_worst", what, worst[:1], worst[1:], 0.55)
    for id, column, what in (
        ("real_first_token_15", SURE_FIRST, "the same first token where full prefill is surer than 0.5"),
        ("real_accuracy_15", RIGHT, "right answers where full prefill's is right"),
    ):
        means = [accuracy(one)[column] for one in ours if np.sum(one.asked, 0)[column]]
        values = [statistics.mean(means)] if means else []
        yield row(id, f"{DEFAULT} at 0.15: {what}", "share", values, 0.97)
    leads = [
        shares([theirs], [cold])[0] - shares([ours], [cold])[0]
        for ratio, selector in product(BARS, SELECTORS)
        if (selector.name, "", ratio) in ways
        for ours, theirs, cold in zip(ways[DEFAULT, "", ratio], ways[selector.name, "", ratio], reuse, strict=True)
    ]
    what = f"by how much another selector wins back more than {DEFAULT} on any workload: the most"
    yield row("real_default_wins", what, "share", [max(leads)], 0.03, "lower")
    apart = shares(ours, reuse)[0]
    what = f"{DEFAULT} at 0.15: share won back where all questions but one find a blend that was made for that one"
    yield _won("real_settled_15", f"{what}, {apart:.2f} otherwise", settled, reuse, apart - 0.15)


def _won(id: str, what: str, ours: Sequence[Outcome], reuse: Sequence[Outcome], bar: float | None = None) -> Row:
    share, *drawn = shares(ours, reuse)
    low, high = np.quantile(drawn, [0.025, 0.975])
    return row(id, what, "share", [share], bar, spread=(float(low), float(high)))


def shares(ours: Sequence[Outcome], reuse: Sequence[Outcome]) -> list[float]:
    """The share won back of the KL of the first token that reuse loses, as the mean of workloads; and such shares where
    prompts are drawn anew from those that were asked.
    """
    random, of_workloads = np.random.default_rng(0), []
    for one, cold in zip(ours, reuse, strict=True):
        n_cases = len(cold.scores)
        drawn = np.vstack([np.arange(n_cases), random.integers(0, n_cases, (RESAMPLES, n_cases))])
        left, lost = (np.array(outcome.scores)[drawn, KL].sum(1) for outcome in (one, cold))
        of_workloads.append(1 - left / lost)
    mean: list[float] = np.mean(of_workloads, 0).tolist()
    return mean
