"""Time to first token against the rate at which requests arrive: one line a server, one panel a percentile."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.load.client import Measured

# Okabe and Ito's colours, which people of every colour vision tell apart.
COLOURS = ("#999999", "#0072B2", "#D55E00")
PERCENTILES = (50, 95)


def draw(found: Mapping[str, Sequence[tuple[float, Measured]]], file: Path) -> None:
    """``found``: for the name of each server, the measurements at each rate."""
    figure = Figure(figsize=(3.6 * len(PERCENTILES), 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    for number, percent in enumerate(PERCENTILES, 1):
        axes = figure.add_subplot(1, len(PERCENTILES), number)
        for (name, measured), colour in zip(found.items(), COLOURS, strict=False):
            rates = sorted({rate for rate, _ in measured})
            seconds = [median(one.first_token_at(percent) for at, one in measured if at == rate) for rate in rates]
            axes.plot(rates, seconds, "o-", color=colour, label=name, markersize=3)
        axes.set(title=f"p{percent}", xlabel="requests a second", ylabel="seconds to the first token", yscale="log")
        axes.grid(alpha=0.3)
    axes.legend()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150)
