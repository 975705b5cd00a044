"""The plots of a report as one picture."""

from blendhub.tools.analysis import charts
from blendhub.tools.analysis.findings import Findings

GAP, TITLE = 30, 26


def draw(found: Findings) -> str:
    """An SVG that fits light and dark pages."""
    panels = [
        ("How large an arena", charts.curve(found.arenas)),
        ("Time to the first token", charts.first_token(found.first_token)),
    ]
    across = charts.WIDTH + GAP
    parts = []
    for number, (title, plot) in enumerate(panels):
        parts.append(f'<text x="{number * across}" y="15" font-weight="600">{title}</text>')
        parts.append(plot.replace("<svg ", f'<svg x="{number * across}" y="{TITLE}" {_size(plot)} ', 1))
    box = f"0 0 {2 * across - GAP} {charts.HEIGHT + TITLE}"
    inside = "\n".join(parts)
    return charts.alone(f'<svg class="plot" viewBox="{box}" role="img" aria-label="{found.verdict}">\n{inside}</svg>')


def _size(plot: str) -> str:
    height = plot.split('viewBox="', 1)[1].split('"', 1)[0].split()[3]
    return f'width="{charts.WIDTH}" height="{height}"'
