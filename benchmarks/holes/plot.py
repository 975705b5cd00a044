"""Times to the first token, from the quickest to the slowest, and what was reused: one line a way and pass."""

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.holes.figures import Found
from benchmarks.quality.plot import COLOURS

STYLES = ("-", "--", ":")


def draw(found: Found, file: Path) -> None:
    """Draw the first repetition."""
    figure = Figure(figsize=(9.6, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    times, shares = figure.subplots(1, 2)
    for colour, (label, (passes, *_)) in zip(COLOURS, found.items(), strict=False):
        for number, measured in enumerate(passes, 1):
            line = {"color": colour, "linestyle": STYLES[min(number, len(STYLES)) - 1], "linewidth": 1.2}
            times.plot(sorted(measured.all("first_token_s")), label=f"{label}, pass {number}", **line)
            shares.plot([one.reused_tokens / one.prompt_tokens for one in measured.queries], **line)
    times.set(xlabel="queries, quickest first", ylabel="seconds to the first token", ylim=(0, None))
    shares.set(xlabel="queries, as asked", ylabel="share of the prompt that was reused", ylim=(-0.05, 1.05))
    figure.legend(loc="outside right upper", frameon=False, fontsize="small")
    figure.savefig(file, dpi=150)
