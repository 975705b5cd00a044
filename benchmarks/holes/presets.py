"""Options under a name: those of our own figures, and those of each published row, which is then printed beside ours.

Published in LMCache-Ascend's pull request 254: Qwen3-8B and the first 150 questions of Musique on one Ascend 910B4, one
request after the other. Pass 1 fills what is missing, pass 2 only reuses.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from benchmarks.holes.figures import FIGURES
from benchmarks.report import Row

Options = Mapping[str, Any]
"""The options by their names on the command line, with ``_`` for ``-``."""


class Published(NamedTuple):
    """What was run, and what came out, by pass and figure; figures that were not published are missing."""

    what: str
    options: Options
    figures: Mapping[str, float]


def _figures(f1: str, hit_rate: str, e2e: str) -> dict[str, float]:
    """Each as the figures of pass 1 and pass 2; ``-`` is not published."""
    given = {"f1": f1, "hit_rate": hit_rate, "e2e": e2e}
    return {
        f"pass_{number}_{name}": float(figure)
        for name, both in given.items()
        for number, figure in enumerate(both.split(), 1)
        if figure != "-"
    }


def _run(ratio: float, ids: list[int], positions: list[int], method: str = "blend", inflate: int = 1) -> Options:
    return {
        "method": [method],
        "recompute_ratio": [ratio],
        "hole_ids": ids,
        "hole_positions": positions,
        "inflate": inflate,
        "separator": "# #",
        "until": 150,
    }


MIDDLE = ([-1], [-1])
PUBLISHED = {
    "no_hole_mode_r50": Published(
        "the middle document missing, their hole mode off, ratio 0.5",
        _run(0.5, *MIDDLE, method="contiguous"),
        _figures("0.3523 0.3657", "0.6038 0.9962", "0.9467 0.7721"),
    ),
    "hole_at_3_r50": Published(
        "document 2 missing, at position 3, ratio 0.5",
        _run(0.5, [2], [3]),
        _figures("0.3388 0.3499", "0.9261 0.9979", "0.9313 0.8293"),
    ),
    "hole_at_6_r50": Published(
        "document 2 missing, at position 6, ratio 0.5",
        _run(0.5, [2], [6]),
        _figures("0.3289 0.3369", "0.9261 0.9979", "0.9314 0.7726"),
    ),
    "hole_at_8_r50": Published(
        "document 2 missing, at position 8, ratio 0.5",
        _run(0.5, [2], [8]),
        _figures("0.3369 0.3372", "0.9261 0.9979", "0.9851 0.7900"),
    ),
    "two_holes_r50": Published(
        "documents 2 and 5 missing, at positions 4 and 7, ratio 0.5",
        _run(0.5, [2, 5], [4, 7]),
        _figures("0.3448 0.3422", "0.8582 0.9991", "1.0187 0.7778"),
    ),
    "no_hole_mode_r30": Published(
        "the middle document missing, their hole mode off, ratio 0.3",
        _run(0.3, *MIDDLE, method="contiguous"),
        _figures("0.3397 0.3228", "0.6038 0.9962", "0.9368 0.7152"),
    ),
    "hole_at_6_r30": Published(
        "document 2 missing, at position 6, ratio 0.3",
        _run(0.3, [2], [6]),
        _figures("0.3039 0.3109", "0.9261 0.9979", "0.8992 0.8222"),
    ),
    # How many documents these two added, and which were missing, we have not read: the hit rates fit prompts two and a
    # half times as long as the others.
    "long_hole_r15": Published(
        "long prompts, one document missing, ratio 0.15",
        _run(0.15, [2], [6], inflate=20),
        _figures("0.2230 0.2200", "- 0.9992", "- 1.1089"),
    ),
    "long_two_holes_r15": Published(
        "long prompts, two documents missing, ratio 0.15",
        _run(0.15, [2, 5], [4, 7], inflate=20),
        _figures("0.2022 0.2022", "- 0.9996", "- 1.1281"),
    ),
}
OWN: dict[str, Options] = {
    where: {
        "method": ["full", "blend", "contiguous", "reuse"],
        "recompute_ratio": [0.15, 0.3],
        "hole_ids": [where],
        "hole_positions": [where],
    }
    for where in ("first", "middle", "last")
}
PRESETS: dict[str, Options] = {**OWN, **{name: one.options for name, one in PUBLISHED.items()}}


def published_rows(name: str | None) -> list[Row]:
    """The published figures of this preset."""
    if name not in PUBLISHED:
        return []
    made, published = [], PUBLISHED[name]
    for id, value in published.figures.items():
        number, figure = id.removeprefix("pass_").split("_", 1)
        what, unit, _, better = FIGURES[figure]
        said = f"published, {published.what}, pass {number}: {what}"
        made.append(Row(f"published_{id}", said, value, unit, None, better, None, None))
    return made
