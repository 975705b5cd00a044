"""The share won back against what it costs: one line a selector, one panel a column."""

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from blendhub_tools.advice.curve import COLOURS
from blendhub_tools.advice.outcomes import Outcome
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.quality.found import Found

COLUMNS = 4


class Cost(NamedTuple):
    label: str
    of: Callable[[Found, Outcome], float]


COMPUTED = Cost(
    "share of the moved tokens that is computed again",
    lambda found, outcome: statistics.mean(outcome.recomputed),
)
SOONER = Cost(
    "time to first token, relative to full prefill",
    lambda found, outcome: statistics.median(outcome.first_token_s) / statistics.median(found.full.first_token_s),
)


def draw(found: Found, file: Path, cost: Cost, panels: Sequence[tuple[str, list[int]]]) -> None:
    across = min(COLUMNS, len(panels))
    rows = -(-len(panels) // across)
    figure = Figure(figsize=(3.6 * across, 3.0 * rows + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    for number, (title, columns) in enumerate(panels):
        _draw_panel(figure.add_subplot(rows, across, number + 1), found, title, columns, cost)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels) or 1, frameon=False)
    figure.supxlabel(cost.label, fontsize="medium")
    figure.supylabel("share won back of what reuse loses", fontsize="medium")
    figure.savefig(file, dpi=150)


def _draw_panel(axes: Axes, found: Found, title: str, columns: list[int], cost: Cost) -> None:
    axes.set_title(title, fontsize="medium")
    axes.axhline(1, color="#BBBBBB", linewidth=0.8)
    axes.axhline(0, color="#BBBBBB", linewidth=0.8)
    axes.set_ylim(-0.25, 1.15)
    axes.spines[["top", "right"]].set_visible(False)
    if found.compared(found.full).share(columns) is None:
        axes.text(0.5, 0.5, "reuse loses next to nothing", ha="center", transform=axes.transAxes)
    for colour, label in zip(COLOURS, found.selectors, strict=False):
        points = [(cost.of(found, one), found.compared(one).share(columns)) for one in found.curve(label)]
        shown = [(x, y) for x, y in points if y is not None]
        width = 2.4 if label == found.default else 1.2
        xs, ys = [x for x, _ in shown], [y for _, y in shown]
        axes.plot(xs, ys, "o-", color=colour, label=label, markersize=3, linewidth=width)
