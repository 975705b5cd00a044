"""Plots of findings as SVG. Their colours come from the page's style, or from the plot's own where it stands alone."""

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from blendhub.tools.analysis.findings import ArenaFound, FirstToken, NamedShares, StretchesFound

WIDTH, HEIGHT = 420, 240
"""Small, so that text is large enough where a phone scales the plot to its width."""

LEFT, RIGHT, TOP, BOTTOM = 42, 120, 14, 40
MOST_DAYS = 60

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


def days(found: Sequence[NamedShares]) -> str:
    """For each day what the hub reuses, and a mark where a prefix cache ends."""
    shown = found[-MOST_DAYS:]
    step = (WIDTH - LEFT - 10) / max(len(shown), 1)
    parts = [*_share_axis(WIDTH - 10)]
    for number, one in enumerate(shown):
        x, width, shares = LEFT + number * step, min(step * 0.8, 40), one.shares
        said = (
            f"{one.name}: exact {shares.exact:.1%}, anywhere {shares.anywhere:.1%}, prefix cache {shares.prefix:.1%}; "
            f"{shares.requests:,} prompts"
        )
        parts.append(_bar(x, _height(shares.anywhere), width, _height(shares.exact), "moved", said))
        parts.append(_bar(x, _height(shares.exact), width, _height(0), "exact", said))
        parts.append(f'<path class="line mark" d="M{x:.1f} {_height(shares.prefix):.1f}h{width:.1f}"/>')
        if number % -(-len(shown) // 6) == 0:
            parts.append(_text(x, HEIGHT - BOTTOM + 18, one.name[5:], "axis"))
    parts += _legend([("exact", "exact"), ("moved", "moved"), ("mark", "prefix cache")])
    return _plot(parts, "Share of the prompt tokens that is reused, by day")


def stretches(found: Sequence[StretchesFound]) -> str:
    """The reused tokens by the length of the reused stretches."""
    total = sum(one.tokens for one in found)
    # Lines at whole per cents.
    most = math.ceil(5 * max(one.tokens for one in found) / total) / 5
    step = (WIDTH - LEFT - 10) / len(found)
    parts = [*_share_axis(WIDTH - 10, most)]
    for number, one in enumerate(found):
        share = one.tokens / total
        said = f"{one.least:,} to {one.most:,} tokens: {share:.1%} of what is reused, {one.number:,} stretches"
        x = LEFT + number * step
        parts.append(_bar(x + step * 0.1, _height(share, most), step * 0.8, _height(0), "exact", said))
        if number % -(-len(found) // 7) == 0:
            parts.append(_text(x + step / 2, HEIGHT - BOTTOM + 18, _short(one.least), "axis", "middle"))
    parts.append(_text((LEFT + WIDTH) / 2, HEIGHT - 4, "tokens of a stretch, from", "axis", "middle"))
    return _plot(parts, "Share of what is reused, by the length of the reused stretches")


def first_token(found: FirstToken) -> str:
    """Bars for the time to the first token."""
    rows = [
        ("full prefill", 1.0, found.full_ms, "computed"),
        ("prefix cache", found.prefix_cache, found.prefix_cache_ms, "prefix"),
        ("BlendHub", found.mean, found.mean_ms, "moved"),
    ]
    parts = []
    for number, (name, share, ms, kind) in enumerate(rows):
        y = 8 + number * 44
        width = max(share * (WIDTH - 100), 1)
        time = f"{share:.2f} x" if ms is None else f"{share:.2f} x, {ms:,.0f} ms"
        parts.append(_text(0, y + 10, name, "axis"))
        parts.append(f'<rect class="fill {kind}" x="0" y="{y + 15}" width="{width:.1f}" height="16" rx="2"/>')
        parts.append(_text(width + 6, y + 28, time, ""))
    return _plot(parts, "Expected time to the first token, by that of a full prefill", 44 * len(rows) + 8)


def _plot(parts: Iterable[str], label: str, height: int = HEIGHT) -> str:
    inside = "\n".join(parts)
    return f'<svg class="plot" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}">{inside}</svg>'


def _share_axis(end: float = WIDTH - RIGHT, most: float = 1.0) -> Iterable[str]:
    for quarter in range(5):
        share = most * quarter / 4
        y = _height(share, most)
        yield f'<path class="grid" d="M{LEFT} {y:.1f}H{end:.1f}"/>'
        yield _text(LEFT - 6, y + 4, f"{share:.0%}", "axis", "end")


def _legend(names: Sequence[tuple[str, str]]) -> Iterable[str]:
    for number, (kind, name) in enumerate(names):
        x = LEFT + number * 110
        yield f'<rect class="fill {kind}" x="{x}" y="{HEIGHT - 13}" width="11" height="11"/>'
        yield _text(x + 16, HEIGHT - 3, name, "axis")


def _bar(x: float, top: float, width: float, bottom: float, kind: str, said: str) -> str:
    height = max(bottom - top, 0)
    begin = f'<rect class="fill {kind}" x="{x:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return _titled(begin, said)


def _titled(begin: str, said: str) -> str:
    name = begin[1:].split(" ", 1)[0]
    return f"{begin}><title>{escape(said)}</title></{name}>"


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _height(share: float, most: float = 1.0) -> float:
    return _scale(share, 0, most, HEIGHT - BOTTOM, TOP)


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


def _short(number: int) -> str:
    return f"{number // 1024}k" if number >= 1024 else str(number)
