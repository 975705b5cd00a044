"""The prompts as bars, coloured by what became of each token."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from blendhub.outcome.fates import COLOURS, Fate
from examples.demo.questions import WAYS, Answer

MOST_PROMPTS, BAR = 4, 0.8


def draw(answers: Sequence[Answer], file: Path) -> None:
    """A bar for each way, of the first question to each of the first prompts."""
    first: dict[tuple[int, str], Answer] = {}
    for answer in answers:
        if answer.prompt <= MOST_PROMPTS:
            first.setdefault((answer.prompt, answer.way), answer)
    figure = Figure(figsize=(13, 1.6 + 0.3 * len(first)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    heights = [row + answer.prompt / 2 for row, answer in enumerate(first.values())]
    for height, answer in zip(heights, first.values(), strict=True):
        for fate in Fate:
            spans = [(stretch.span.start, len(stretch.span)) for stretch in answer.plan if stretch.fate is fate]
            axes.broken_barh(spans, (height - BAR / 2, BAR), color=COLOURS[fate], linewidth=0)
        axes.text(answer.plan[-1].span.end + 4, height, f"{1e3 * answer.first_token_s:.0f} ms", va="center")
    axes.set_yticks(heights, [f"prompt {prompt}, {WAYS[way][0]}" for prompt, way in first])
    axes.invert_yaxis()
    axes.margins(x=0.01, y=0.02)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    axes.set_xlabel("token of the prompt; beside each bar the time to the first token")
    figure.suptitle("What became of each token")
    patches = [Patch(color=COLOURS[fate], label=fate.label) for fate in Fate]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(Fate), frameon=False)
    figure.savefig(file, dpi=150)
