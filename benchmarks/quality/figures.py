"""One measure of all workloads, a column each; the rows that sum it up, and README's picture."""

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from blendhub_tools.advice.judge import FIRST, KL, RIGHT, SURE_FIRST
from blendhub_tools.advice.outcomes import Comparison, Outcome, accuracy

from benchmarks.quality.measure import SELECTORS
from benchmarks.report import Row, measured_row
from blendhub.vllm.settings import Settings

COLOURS = ("#D55E00", "#0072B2", "#009E73")
"""Okabe and Ito's, which people of every colour vision tell apart."""

BARS = {0.05: 0.40, 0.15: 0.70, 0.3: 0.90}
DEFAULT = Settings().selector.name
LOST = "not measured, or reuse loses next to nothing"


class Table:
    """The outcomes of all workloads in one measure, by selector, state and ratio; a column for each workload."""

    def __init__(self, outcomes: Sequence[Outcome], measure: int, relative: bool = False) -> None:
        """``relative``: to what reuse loses, so that all workloads count alike."""
        self.columns = list(dict.fromkeys(outcome.workload for outcome in outcomes))
        lost = {
            one.workload: -accuracy(one)[measure] if relative else 1.0 for one in outcomes if one.selector == "reuse"
        }
        groups: dict[tuple[str, str, float], list[Outcome]] = {}
        for outcome in outcomes:
            groups.setdefault(outcome.key, []).append(outcome)
        # Only ways of serving that every workload was asked in.
        self.all = {
            key: _merged(those, measure, [lost[outcome.workload] for outcome in those])
            for key, those in groups.items()
            if len(those) == len(self.columns)
        }
        self.full, self.reuse = self.all["full", "", 1.0], self.all["reuse", "", 0.0]
        asked = np.sum(self.full.asked, 0)
        self.main = [number for number in range(len(self.columns)) if asked[number]]
        """The columns whose mean counts: those with questions that have such a score."""

    def compared(self, selector: str, ratio: float, state: str = "") -> Comparison | None:
        outcome = self.all.get((selector, state, ratio))
        return Comparison(outcome, self.full, self.reuse) if outcome else None

    def share(self, selector: str, ratio: float, columns: Sequence[int], state: str = "") -> float | None:
        compared = self.compared(selector, ratio, state)
        return compared.share(columns) if compared else None


def won_back(outcomes: Sequence[Outcome]) -> Table:
    """The share of the KL of the first token that reuse loses."""
    return Table(outcomes, KL, relative=True)


def rows(outcomes: Sequence[Outcome]) -> list[Row]:
    table = won_back(outcomes)
    return [
        *_of_reuse(outcomes),
        *_of_the_default(outcomes, table),
        *_of_states(outcomes),
        *_of_selectors(table),
    ]


def _of_reuse(outcomes: Sequence[Outcome]) -> Iterator[Row]:
    measures: list[tuple[int, str, str, str, Literal["lower", "higher"]]] = [
        (KL, "kl", "KL of the first token", "nats", "lower"),
        (FIRST, "first", "the same first token", "share", "higher"),
    ]
    for measure, id, what, unit, better in measures:
        table = Table(outcomes, measure)
        for name, value in zip(table.columns, np.abs(accuracy(table.reuse)).tolist(), strict=True):
            said = f"{name}: {what}, nothing recomputed"
            yield measured_row(f"real_{name}_reuse_{id}", said, unit, value, better=better)
    right = Table(outcomes, RIGHT)
    for column in right.main:
        name = right.columns[column]
        full = next(outcome for outcome in outcomes if outcome.workload == name)
        of_all = sum(case[column] for case in right.full.asked) / sum(case[KL] for case in full.asked)
        yield measured_row(f"real_{name}_full_right", "right answers of full prefill", "share", of_all)


def _of_the_default(outcomes: Sequence[Outcome], table: Table) -> Iterator[Row]:
    for ratio, bar in BARS.items():
        what = f"{DEFAULT}: share won back of the KL that reuse loses, at {ratio:g}: mean of all workloads"
        yield _won(f"real_recovered_{round(ratio * 100):02d}", what, table.compared(DEFAULT, ratio), table.main, bar)
        if ratio == 0.15:
            shares = [table.share(DEFAULT, ratio, [column]) or 0.0 for column in table.main]
            worst = table.main[int(np.argmin(shares))]
            what = f"{DEFAULT}: the worst of these, {table.columns[worst]}"
            yield _won("real_recovered_15_worst", what, table.compared(DEFAULT, ratio), [worst], 0.55)
    for id, measure, what in (
        ("real_first_token_15", SURE_FIRST, "the same first token where full prefill is surer than 0.5"),
        ("real_accuracy_15", RIGHT, "right answers where full prefill's is right"),
    ):
        scores = Table(outcomes, measure)
        outcome = scores.all.get((DEFAULT, "", 0.15))
        value = float(accuracy(outcome)[scores.main].mean()) if outcome and scores.main else None
        yield measured_row(id, f"{DEFAULT} at 0.15: {what}", "share", value, 0.97)
    leads = [
        theirs - ours
        for ratio in BARS
        for selector in SELECTORS
        for column in table.main
        if (ours := table.share(DEFAULT, ratio, [column])) is not None
        and (theirs := table.share(selector.name, ratio, [column])) is not None
    ]
    what = f"by how much another selector wins back more than {DEFAULT} on any workload: the most"
    yield measured_row("real_default_wins", what, "share", max(leads, default=None), 0.03, "lower")


def _of_states(outcomes: Sequence[Outcome]) -> Iterator[Row]:
    """How the default fares after more than one visit, on the workloads that have such a state."""
    shares: dict[str, tuple[float | None, float | None]] = {}
    for state in ("settled", "warm"):
        asked = {outcome.workload for outcome in outcomes if outcome.state == state}
        table = won_back([outcome for outcome in outcomes if outcome.workload in asked]) if asked else None
        there, cold = (table.share(DEFAULT, 0.15, table.main, name) if table else None for name in (state, ""))
        shares[state] = there, cold
    settled, cold = shares["settled"]
    what = f"{DEFAULT} at 0.15: share lost where all questions but one find a blend that was made for that one"
    lost = None if cold is None or settled is None else cold - settled
    yield measured_row("real_settled_15", what, "share", lost, 0.15, "lower", why=LOST)
    warm, cold = shares["warm"]
    what = f"{DEFAULT} at 0.15: share won back where each document was computed behind two others, {cold or 0:.2f} cold"
    yield measured_row("real_warm_15", what, "share", warm, why=LOST)


def _of_selectors(table: Table) -> Iterator[Row]:
    full_s = statistics.median(table.full.first_token_s)
    for (name, state, ratio), ours in table.all.items():
        if name in ("full", "reuse"):
            continue
        compared = Comparison(ours, table.full, table.reuse)
        if not state:
            what = f"{name}: share won back, {statistics.mean(ours.recomputed):.0%} of the moved text computed, "
            what += f"first token after {statistics.median(ours.first_token_s) / full_s:.2f} of full prefill's time"
            yield _won(f"real_{name}_{round(ratio * 100):02d}", what, compared, table.main)
        for column in table.main:
            workload = table.columns[column]
            id = "_".join(filter(None, ["real", workload, name, f"{ratio * 100:02.0f}", state]))
            what = f"{f'{name} {state}'.strip()}: share won back of the KL, {workload}"
            yield _won(id, what, compared, [column])


def _won(id: str, what: str, compared: Comparison | None, columns: Sequence[int], bar: float | None = None) -> Row:
    share, spread = (compared.share(columns), compared.interval(columns)) if compared else (None, None)
    return measured_row(id, what, "share", share, bar, spread=spread, why=LOST)


def _merged(outcomes: Sequence[Outcome], measure: int, scale: Sequence[float]) -> Outcome:
    """One outcome whose columns are workloads."""
    scores, asked = [], []
    for column, (outcome, by) in enumerate(zip(outcomes, scale, strict=True)):
        for score, questions in zip(outcome.scores, outcome.asked, strict=True):
            scores.append([score[measure] / by if number == column else 0.0 for number in range(len(outcomes))])
            asked.append([questions[measure] if number == column else 0 for number in range(len(outcomes))])
    seconds = [second for outcome in outcomes for second in outcome.first_token_s]
    recomputed = [share for outcome in outcomes for share in outcome.recomputed]
    return Outcome(*outcomes[0].key, scores, asked, recomputed, seconds)


def draw(table: Table, file: Path) -> None:
    """The share won back against what is computed again: one line a selector."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for share in (0, 1):
        axes.axhline(share, color="#BBBBBB", linewidth=0.8)
    for colour, selector in zip(COLOURS, SELECTORS, strict=False):
        curve = sorted((key, ours) for key, ours in table.all.items() if key[:2] == (selector.name, ""))
        computed = [statistics.mean(ours.recomputed) for _, ours in curve]
        shares = [table.share(*key[::2], table.main) or np.nan for key, _ in curve]
        width = 2.4 if selector.name == DEFAULT else 1.2
        axes.plot(computed, shares, "o-", color=colour, label=selector.name, markersize=3, linewidth=width)
    axes.set(xlabel="share of the moved tokens that is computed again", ylabel="share won back of what reuse loses")
    axes.set_ylim(-0.25, 1.15)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(file, dpi=150)
