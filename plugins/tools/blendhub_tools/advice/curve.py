"""Draws agreement and what is lost, each against what is recomputed; needs matplotlib."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from blendhub_tools.advice.choice import agreement, interval
from blendhub_tools.advice.figures import Measured

# Okabe and Ito's colours, which people of every colour vision tell apart.
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#000000", "#F0E442", "#999999", "#882255")


def draw(measured: Sequence[Measured], tokens: int, file: Path) -> None:
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    agree, lose = figure.subplots(1, 2)
    agree.set_ylabel(f"answers whose {tokens} tokens agree")
    agree.set_ylim(0, 1.02)
    lose.set_ylabel("nats lost on full prefill's answer")
    labels = list(dict.fromkeys(one.ours.selector for one in measured))
    for number, label in enumerate(labels):
        curve = sorted((one for one in measured if one.ours.selector == label), key=lambda one: one.computed)
        shares = [(agreement(one.ours), *interval(one.ours)) for one in curve]
        for axes, values in ((agree, shares), (lose, [one.lost for one in curve])):
            middle = [value for value, _, _ in values]
            reach = [
                [max(0.0, value - low) for value, low, _ in values],
                [max(0.0, high - value) for value, _, high in values],
            ]
            computed = [one.computed for one in curve]
            colour = COLOURS[number % len(COLOURS)]
            axes.errorbar(computed, middle, reach, fmt="o-", color=colour, label=label, markersize=3, capsize=2)
    for axes in (agree, lose):
        axes.spines[["top", "right"]].set_visible(False)
    lose.set_ylim(bottom=0)
    figure.supxlabel("share of the moved text that is recomputed; bars: 95% intervals", fontsize="medium")
    figure.legend(*agree.get_legend_handles_labels(), loc="outside upper center", ncols=len(labels), frameon=False)
    figure.savefig(file, dpi=150, format="png")
