"""One measure of all workloads, a column each; the rows that sum it up, and README's picture."""

import statistics
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

import numpy as np
from blendhub_tools.advice.judge import FIRST, KL, RIGHT, SURE_FIRST
from blendhub_tools.advice.outcomes import Comparison, Outcome, accuracy

from benchmarks.quality.measure import SELECTORS
from benchmarks.report import Row, row
from blendhub.vllm.settings import Settings

COLOURS = ("#D55E00", "#0072B2", "#009E73")
"""Okabe and Ito's, which people of every colour vision tell apart."""
BARS = {0.0: 0.40, 0.05: 0.70, 0.15: 0.85, 0.3: None}
DEFAULT = Settings().selector.name


class Table:
    """The outcomes of all workloads in one measure, by selector, state and ratio; a column for each workload."""

    def __init__(self, outcomes: Sequence[Outcome], measure: int, relative: bool = False) -> None:
        """``relative``: to what reuse loses, so that all workloads count alike."""
        self.columns = list(dict.fromkeys(outcome.workload for outcome in outcomes))
        scales = {
            outcome.workload: -accuracy(outcome)[measure] if relative else 1.0
            for outcome in outcomes
            if outcome.selector == "reuse"
        }
        groups: dict[tuple[str, str, float], list[Outcome]] = {}
        for outcome in outcomes:
            groups.setdefault(outcome.key, []).append(outcome)
        # Only ways of serving that every workload was asked in.
        self.all = {
            key: _merged(group, measure, [scales[outcome.workload] for outcome in group])
            for key, group in groups.items()
            if len(group) == len(self.columns)
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


def _merged(outcomes: Sequence[Outcome], measure: int, scales: Sequence[float]) -> Outcome:
    """One outcome whose columns are workloads."""
    scores, asked = [], []
    for column, (outcome, scale) in enumerate(zip(outcomes, scales, strict=True)):
        only = np.eye(len(outcomes))[column]
        scores += [(only * score[measure] / scale).tolist() for score in outcome.scores]
        asked += [(only * questions[measure]).astype(int).tolist() for questions in outcome.asked]
    seconds = [second for outcome in outcomes for second in outcome.first_token_s]
    recomputed = [share for outcome in outcomes for share in outcome.recomputed]
    return Outcome(*outcomes[0].key, scores, asked, recomputed, seconds)


def won_back(outcomes: Sequence[Outcome]) -> Table:
    """The share of the KL of the first token that is lost where text is reused as it was computed once."""
    return Table(outcomes, KL, relative=True)


def rows(outcomes: Sequence[Outcome]) -> Iterator[Row]:
    table, kl, first, right = won_back(outcomes), *(Table(outcomes, measure) for measure in (KL, FIRST, RIGHT))
    for name, lost, same in zip(kl.columns, accuracy(kl.reuse), accuracy(first.reuse), strict=True):
        cold = f"{name}: computed once, at any place, nothing recomputed"
        yield row(f"real_{name}_reuse_kl", f"{cold}: KL of the first token", "nats", [abs(lost)], better="lower")
        yield row(f"real_{name}_reuse_first", f"{cold}: the same first token", "share", [same])
    for name, times in {outcome.workload: outcome.times_computed for outcome in outcomes}.items():
        what = f"{name}: how often each document was computed until all could move"
        yield row(f"steady_{name}_computed", what, "times", [times], better="lower")
    right_answers, asked = np.sum(right.full.asked, 0), np.sum(kl.full.asked, 0)
    for column in right.main:
        share = right_answers[column] / asked[column]
        yield row(f"real_{right.columns[column]}_full_right", "right answers of full prefill", "share", [share])
    yield from _of_the_default(outcomes, table)
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
            yield _won(id, f"{f'{name} {state}'.strip()}: share won back of the KL, {workload}", compared, [column])


def _of_the_default(outcomes: Sequence[Outcome], table: Table) -> Iterator[Row]:
    for ratio, bar in BARS.items():
        what = f"{DEFAULT}: share won back of the KL that cold reuse loses, at {ratio:g}: mean of all workloads"
        yield _won(f"steady_{round(ratio * 100):02d}", what, table.compared(DEFAULT, ratio), table.main, bar)
    shares = [table.share(DEFAULT, 0.15, [column]) or 0.0 for column in table.main]
    worst = table.main[int(np.argmin(shares))]
    what = f"{DEFAULT}: the worst of these at 0.15, {table.columns[worst]}"
    yield _won("steady_15_worst", what, table.compared(DEFAULT, 0.15), [worst], 0.55)
    for id, measure, what in (
        ("real_first_token_15", SURE_FIRST, "the same first token where full prefill is surer than 0.5"),
        ("real_accuracy_15", RIGHT, "right answers where full prefill's is right"),
    ):
        scores = Table(outcomes, measure)
        outcome = scores.all.get((DEFAULT, "", 0.15))
        means = [float(accuracy(outcome)[scores.main].mean())] if outcome and scores.main else []
        yield row(id, f"{DEFAULT} at 0.15: {what}", "share", means, 0.97)
    leads = [
        theirs - ours
        for ratio, selector, column in product(BARS, SELECTORS, table.main)
        if (ours := table.share(DEFAULT, ratio, [column])) is not None
        and (theirs := table.share(selector.name, ratio, [column])) is not None
    ]
    what = f"by how much another selector wins back more than {DEFAULT} on any workload: the most"
    yield row("real_default_wins", what, "share", [max(leads)] if leads else [], 0.03, "lower")
    apart, settled = (table.share(DEFAULT, 0.15, table.main, state) for state in ("", "settled"))
    what = f"{DEFAULT} at 0.15: share won back where all questions but one find a blend that was made for that one"
    least = None if apart is None else apart - 0.15
    values = [] if settled is None else [settled]
    yield row("real_settled_15", f"{what}, {apart or 0:.2f} otherwise", "share", values, least)


def _won(id: str, what: str, compared: Comparison | None, columns: Sequence[int], bar: float | None = None) -> Row:
    share = compared.share(columns) if compared else None
    if compared is None or share is None:
        return row(id, f"not measured, or reuse loses next to nothing: {what}", "share", [], bar)
    return row(id, what, "share", [share], bar, spread=compared.interval(columns))


def draw(table: Table, file: Path) -> None:
    """The share won back against what is computed again: one line a selector."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for share in (0, 1):
        axes.axhline(share, color="#BBBBBB", linewidth=0.8)
    for colour, selector in zip(COLOURS, SELECTORS, strict=True):
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
