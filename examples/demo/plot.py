"""The prompts as bars, coloured by what became of each token."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from blendhub.outcome.fates import COLOURS, Fate
from examples.demo.experiment import WAYS, Measured

MOST_PROMPTS = 4
BAR = 0.8


def draw(measured: Sequence[Measured], file: Path) -> None:
    """For each of the first prompts, a bar for each way."""
    shown = [serving for serving in measured if serving.prompt <= MOST_PROMPTS]
    figure = Figure(figsize=(13, 1.6 + 0.3 * len(shown)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    heights = [row + serving.prompt / 2 for row, serving in enumerate(shown)]
    for height, serving in zip(heights, shown, strict=True):
        _draw_bar(axes, height, serving)
    axes.set_yticks(heights, [f"prompt {serving.prompt}, {WAYS[serving.way][0]}" for serving in shown])
    axes.invert_yaxis()
    axes.margins(x=0.01, y=0.02)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    axes.set_xlabel("token of the prompt; beside each bar the median time to the first token")
    figure.suptitle("What became of each token")
    figure.legend(
        handles=[Patch(color=COLOURS[fate], label=fate.label) for fate in Fate],
        loc="outside lower center",
        ncols=len(Fate),
        frameon=False,
    )
    figure.savefig(file, dpi=150)


def _draw_bar(axes: Axes, height: float, serving: Measured) -> None:
    for fate in Fate:
        spans = [(stretch.span.start, len(stretch.span)) for stretch in serving.plan if stretch.fate is fate]
        axes.broken_barh(spans, (height - BAR / 2, BAR), color=COLOURS[fate], linewidth=0)
    seconds = statistics.median(said.first_token_s for said in serving.said)
    axes.annotate(
        f"{1e3 * seconds:.0f} ms", (serving.plan[-1].span.end, height), (4, 0), textcoords="offset points", va="center"
    )
