"""Options under a name: of our own figures, and of the rows that others published, which README.md lists."""

from typing import Any, TypeAlias

from research.holes.places import NAMES, Place

Options: TypeAlias = dict[str, Any]
"""The options by their names in the parsed arguments."""


def _holes(*places: tuple[Place, Place]) -> Options:
    """The document's number, and its position in the prompt."""
    return {"hole_ids": [number for number, _ in places], "hole_positions": [position for _, position in places]}


def _published(ratio: float, *places: tuple[Place, Place], method: str = "blend", inflate: int = 1) -> Options:
    """A row of LMCache-Ascend's pull request 254: the first 150 questions of Musique, one request after the other."""
    run = {"method": [method], "recompute_ratio": [ratio], "inflate": inflate, "inflate_order": "same"}
    return {**run, "separator": "# #", "until": 150, **_holes(*places)}


MIDDLE = ("middle", "middle")
PUBLISHED = {
    "no_hole_mode_r50": _published(0.5, MIDDLE, method="contiguous"),
    "hole_at_3_r50": _published(0.5, (2, 3)),
    "hole_at_6_r50": _published(0.5, (2, 6)),
    "hole_at_8_r50": _published(0.5, (2, 8)),
    "two_holes_r50": _published(0.5, (2, 4), (5, 7)),
    "no_hole_mode_r30": _published(0.3, MIDDLE, method="contiguous"),
    "hole_at_6_r30": _published(0.3, (2, 6)),
    "long_no_hole_mode_r15": _published(0.15, MIDDLE, method="contiguous", inflate=20),
    "long_hole_r15": _published(0.15, (2, 6), inflate=20),
    "long_two_holes_r15": _published(0.15, (2, 4), (5, 7), inflate=20),
    "inflate_10_r15": _published(0.15, (2, 6), inflate=10),
    "inflate_30_r15": _published(0.15, (2, 6), inflate=30),
    "full_vllm": _published(0.0, MIDDLE, method="full"),
    "reuse_without_blending": _published(0.0, MIDDLE, method="reuse"),
}
COMPARED: Options = {"method": ["full", "blend", "contiguous", "reuse"], "recompute_ratio": [0.15, 0.3]}
OWN = {where: {**COMPARED, **_holes((where, where))} for where in NAMES}
PRESETS: dict[str, Options] = {**OWN, **PUBLISHED}
