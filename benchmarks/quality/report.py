"""The report: a page to read, and the plots."""

import statistics
from pathlib import Path

from benchmarks.quality.found import Found
from benchmarks.quality.rows import AT
from blendhub.tools.advice.outcomes import Outcome, accuracy


def write(found: Found, text: str, out: Path) -> None:
    from benchmarks.quality import plot  # not at the top: it needs matplotlib

    out.mkdir(parents=True, exist_ok=True)
    plot.draw(found, out / "by_compute.png", plot.COMPUTED)
    plot.draw(found, out / "by_time.png", plot.SOONER)
    (out / "report.md").write_text(text)


def page(found: Found) -> str:
    asked = [sum(case[number] for case in found.full.asked) for number in range(len(found.columns))]
    lines = [
        "# Answers, with and without reuse",
        "",
        f"{len(found.full.scores)} prompts, {min(asked)} to {max(asked)} questions a column, fewer with holes. "
        "Scores in percent; in brackets the percentage won back of what reuse without recomputation loses.",
        "",
    ]
    for ratio in AT:
        lines += [f"## {ratio:.0%} recomputed", "", *_table(found, ratio), ""]
    return "\n".join([*lines, "![by compute](by_compute.png)", "", "![by time](by_time.png)", ""])


def _table(found: Found, ratio: float) -> list[str]:
    names = ["", *(name for name, _ in found.panels), "computed", "first token, s"]
    rows = [names, ["---"] * len(names), _cells("full prefill", found, found.full), _cells("reuse", found, found.reuse)]
    for outcome in found.all.values():
        if outcome.ratio == ratio or (outcome.selector == "reuse" and outcome.state):
            rows.append(_cells(f"{outcome.selector} {outcome.state}".strip(), found, outcome))
    return ["| " + " | ".join(cells) + " |" for cells in rows]


def _cells(name: str, found: Found, outcome: Outcome) -> list[str]:
    cells = [name]
    for _, columns in found.panels:
        score = float(accuracy(outcome)[columns].mean())
        baseline = outcome.selector in ("full", "reuse")
        share = None if baseline else found.compared(outcome).share(columns)
        cells.append(f"{100 * score:.1f}" + ("" if share is None else f" ({100 * share:.0f})"))
    cells.append(f"{statistics.mean(outcome.recomputed):.0%}")
    return [*cells, f"{statistics.median(outcome.first_token_s):.3f}"]
