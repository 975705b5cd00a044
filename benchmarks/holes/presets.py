"""Options under a name: of our own figures, and of the rows that others published, which docs/ascend.md lists."""

from collections.abc import Sequence
from typing import Any, TypeAlias

from benchmarks.holes.order import NAMES, Place

Options: TypeAlias = dict[str, Any]
"""The options by their names in the parsed arguments."""


def _holes(ids: Sequence[Place], positions: Sequence[Place]) -> Options:
    return {"hole_ids": list(ids), "hole_positions": list(positions)}


def _published(
    ratio: float, ids: Sequence[Place], positions: Sequence[Place], method: str = "blend", inflate: int = 1
) -> Options:
    """A row of LMCache-Ascend's pull request 254: the first 150 questions of Musique, one request after the other."""
    run = {"method": [method], "recompute_ratio": [ratio], "inflate": inflate, "separator": "# #", "until": 150}
    return {**run, **_holes(ids, positions)}


PUBLISHED = {
    "no_hole_mode_r50": _published(0.5, ["middle"], ["middle"], method="contiguous"),
    "hole_at_3_r50": _published(0.5, [2], [3]),
    "hole_at_6_r50": _published(0.5, [2], [6]),
    "hole_at_8_r50": _published(0.5, [2], [8]),
    "two_holes_r50": _published(0.5, [2, 5], [4, 7]),
    "no_hole_mode_r30": _published(0.3, ["middle"], ["middle"], method="contiguous"),
    "hole_at_6_r30": _published(0.3, [2], [6]),
    # How many documents these two added, and which were missing, we have not read: the hit rates fit prompts two and a
    # half times as long as the others.
    "long_hole_r15": _published(0.15, [2], [6], inflate=20),
    "long_two_holes_r15": _published(0.15, [2, 5], [4, 7], inflate=20),
}
COMPARED: Options = {"method": ["full", "blend", "contiguous", "reuse"], "recompute_ratio": [0.15, 0.3]}
OWN = {where: {**COMPARED, **_holes([where], [where])} for where in NAMES}
PRESETS: dict[str, Options] = {**OWN, **PUBLISHED}
