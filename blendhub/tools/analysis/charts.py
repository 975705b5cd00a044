"""Plots of findings as SVG. Their colours come from the page's style, or from the plot's own where it stands alone."""

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from blendhub.tools.analysis.findings import ArenaFound, FirstToken

WIDTH, HEIGHT = 420, 240
"""Small, so that text is large enough where a phone scales the plot to its width."""

LEFT, RIGHT, TOP, BOTTOM = 42, 120, 14, 40

# Okabe and Ito's colours, lighter where the page is dark: people of every colour vision tell them apart.
LIGHT = {"prefix": "#6e7781", "exact": "#0072b2", "moved": "#00855f", "computed": "#b94a00"}
DARK = {"prefix": "#adb6c0", "exact": "#56b4e9", "moved": "#2fc29a", "computed": "#f0883e"}


def _coloured(kinds: Mapping[str, str], ink: str, faint: str, line: str) -> str:
    """Style sheet rules. No variables: some programs that show SVG do not know them."""
    rules = [f".plot text {{ fill: {ink} }} .plot .axis {{ fill: {faint} }} .plot .grid {{ stroke: {line} }}"]
    for kind, colour in {**kinds, "mark": ink}.items():
        rules.append(f".plot .fill.{kind}, .plot .name.{kind} {{ fill: {colour} }}")
        rules.append(f".plot .line.{kind} {{ stroke: {colour} }}")
    return "\n".join(rules)


STYLE = f"""
.plot {{ font: 13px system-ui, sans-serif }} .plot .name {{ font-weight: 600 }}
.plot .line {{ fill: none; stroke-width: 2.5 }}
.plot .line.prefix {{ stroke-dasharray: 2 4 }} .plot .line.exact {{ stroke-dasharray: 8 4 }}
{_coloured(LIGHT, "#24292f", "#57606a", "#d0d7de")}
@media (prefers-color-scheme: dark) {{
{_coloured(DARK, "#e6edf3", "#adb6c0", "#444c56")} }}
"""


def alone(plot: str) -> str:
    """The plot as a whole file."""
    begin = '<svg xmlns="http://www.w3.org/2000/svg" '
    return plot.replace("<svg ", begin, 1).replace(">", f"><style>{STYLE}</style>", 1) + "\n"


def curve(arenas: Sequence[ArenaFound]) -> str:
    """The shares that are reused, against the size of the arena."""
    lows, highs = math.log(arenas[0].gib), math.log(arenas[-1].gib)
    across = [_scale(math.log(one.gib), lows, highs, LEFT, WIDTH - RIGHT) for one in arenas]
    parts = [*_share_axis()]
    for x, one in zip(across, arenas, strict=True):
        parts.append(_text(x, HEIGHT - BOTTOM + 18, _size(one.gib), "axis", "middle"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 4, "arena, GiB", "axis", "middle"))
    names = {"anywhere": "moved", "exact": "exact", "prefix": "prefix"}
    ends = _apart([_height(getattr(arenas[-1], name)) for name in names])
    for (name, kind), end in zip(names.items(), ends, strict=True):
        shares = [getattr(one, name) for one in arenas]
        points = " ".join(f"{x:.1f},{_height(share):.1f}" for x, share in zip(across, shares, strict=True))
        parts.append(f'<polyline class="line {kind}" points="{points}"/>')
        for x, share, one in zip(across, shares, arenas, strict=True):
            said = f"{name}: {share:.1%} with {one.gib:,.4g} GiB, {one.tokens:,} tokens"
            parts.append(_titled(f'<circle class="fill {kind}" cx="{x:.1f}" cy="{_height(share):.1f}" r="4"', said))
        parts.append(_text(WIDTH - RIGHT + 9, end + 4, f"{name} {shares[-1]:.0%}", f"name {kind}"))
    return _plot(parts, "Share of the prompt tokens that is reused, by the size of the arena")


def first_token(found: FirstToken) -> str:
    """Bars for the time to the first token."""
    rows = [
        ("full prefill", 1.0, "computed"),
        ("prefix cache", found.prefix_cache, "prefix"),
        ("BlendHub", found.mean, "moved"),
    ]
    parts = []
    for number, (name, share, kind) in enumerate(rows):
        y = 8 + number * 44
        width = max(share * (WIDTH - 100), 1)
        parts.append(_text(0, y + 10, name, "axis"))
        parts.append(f'<rect class="fill {kind}" x="0" y="{y + 15}" width="{width:.1f}" height="16" rx="2"/>')
        parts.append(_text(width + 6, y + 28, f"{share:.2f} x", ""))
    return _plot(parts, "Expected time to the first token, relative to full prefill", 44 * len(rows) + 8)


def _plot(parts: Iterable[str], label: str, height: int = HEIGHT) -> str:
    inside = "\n".join(parts)
    return f'<svg class="plot" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}">{inside}</svg>'


def _share_axis() -> Iterable[str]:
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = _height(share)
        yield f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT:.1f}"/>'
        yield _text(LEFT - 6, y + 4, f"{share:.0%}", "axis", "end")


def _titled(begin: str, said: str) -> str:
    name = begin[1:].split(" ", 1)[0]
    return f"{begin}><title>{escape(said)}</title></{name}>"


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _height(share: float) -> float:
    return _scale(share, 0, 1, HEIGHT - BOTTOM, TOP)


def _scale(value: float, low: float, high: float, start: float, end: float) -> float:
    return start if high == low else start + (value - low) / (high - low) * (end - start)


def _apart(heights: Sequence[float], least: float = 16) -> list[float]:
    """The heights of labels, moved so that none covers another."""
    placed: dict[int, float] = {}
    last = -math.inf
    for at in sorted(range(len(heights)), key=lambda at: heights[at]):
        last = placed[at] = max(heights[at], last + least)
    # Those that were pushed below the plot push the others up.
    floor = float(HEIGHT - BOTTOM)
    for at in sorted(placed, key=lambda at: -placed[at]):
        placed[at] = floor = min(placed[at], floor)
        floor -= least
    return [placed[at] for at in range(len(heights))]


def _size(gib: float) -> str:
    return f"{gib:.3g}" if gib < 1024 else f"{gib / 1024:.3g}Ti"
