"""The part of a model card that an engine reads: what `blendhub advise` measured on a model, and what that permits."""

import math
import re
from pathlib import Path
from typing import Any

import msgspec

BLOCK = re.compile(r"^```json\n(.*?)^```$", re.DOTALL | re.MULTILINE)


class Figure(msgspec.Struct, frozen=True):
    """What one selector at one ratio reached."""

    selector: str
    options: dict[str, Any]
    ratio: float
    same: int
    """How many answers were full prefill's own."""
    answers: int
    low: float
    """The lower end of the 95% interval of their share."""


class ModelCard(msgspec.Struct, frozen=True):
    model: str
    dtype: str
    tokens: int
    """The most tokens of an answer."""
    measured: tuple[Figure, ...]


class Use(msgspec.Struct, frozen=True):
    """How an engine would blend."""

    model: str
    dtype: str
    selector: str
    options: dict[str, Any]
    ratio: float
    expected: float
    """The agreement that a card must show."""


def dtype_name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def read_card(text: str) -> ModelCard:
    """The card that a page has; raises ValueError if it has none."""
    block = BLOCK.search(text)
    return msgspec.json.decode(block[1] if block else "", type=ModelCard)


def why_not(card: ModelCard, use: Use) -> str:
    """How the card does not permit this use, as the rest of a sentence about it; empty: it does."""
    # A model is served under other paths on other machines.
    names = ("model", Path(card.model).name, Path(use.model).name)
    for what, theirs, ours in (names, ("dtype", card.dtype, use.dtype)):
        if theirs != ours:
            return f"is for the {what} {theirs}, and this engine serves {ours}"
    asked = f"{use.selector} {use.options or ''}".strip() + f" at recompute_ratio {use.ratio:g}"
    for one in card.measured:
        if (one.selector, one.options) == (use.selector, use.options) and math.isclose(one.ratio, use.ratio):
            if one.low >= use.expected:
                return ""
            return (
                f"says that {one.same} of {one.answers} answers agree with {asked}, which shows an agreement of "
                f"{one.low:.2f}, and expected_agreement is {use.expected:g}"
            )
    known = ", ".join(f"{one.selector} at {one.ratio:g}" for one in card.measured)
    return f"has no figures of {asked}, only of {known}"
