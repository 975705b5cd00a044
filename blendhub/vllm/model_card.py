"""The part of a model card that an engine reads: what `blendhub advise` measured on a model, and what that permits."""

import math
import re
from pathlib import Path
from typing import Any

import msgspec

from blendhub.vllm.model_support import ModelSupport
from blendhub.vllm.settings import OWNER, Settings

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


def permitted(support: ModelSupport, settings: Settings, served: Any) -> ModelSupport:
    """What the model supports, without blending if the settings name a card that does not permit it.

    ``served`` is vLLM's configuration of the model.
    """
    path = settings.model_card
    if not (path and support.blends):
        return support
    why = _why_not(Path(path), settings, served.model, dtype_of(served))
    if not why:
        return support
    reason = f"only exact prefixes are reused: {OWNER}.model_card, {path}, {why}"
    return msgspec.structs.replace(support, blends=False, audits=False, reasons=(*support.reasons, reason))


def dtype_of(served: Any) -> str:
    return str(served.dtype).removeprefix("torch.")


def _why_not(path: Path, settings: Settings, model: str, dtype: str) -> str:
    try:
        block = BLOCK.search(path.read_text(encoding="utf-8"))
        card = msgspec.json.decode(block[1] if block else "", type=ModelCard)
    except (OSError, ValueError) as error:
        advise = f"blendhub advise --model {model} --data FILE --card {path}"
        return f"is no card that can be read ({error}); `{advise}` makes one"
    # A model is served under other paths on other machines.
    names = ("model", Path(card.model).name, Path(model).name)
    for what, theirs, ours in (names, ("dtype", card.dtype, dtype)):
        if theirs != ours:
            return f"is for the {what} {theirs}, and this engine serves {ours}"
    chosen, ratio, least = settings.selector, settings.recompute_ratio, settings.expected_agreement
    asked = f"{chosen.name} {dict(chosen.options) or ''}".strip() + f" at recompute_ratio {ratio:g}"
    for one in card.measured:
        if (one.selector, one.options) == (chosen.name, chosen.options) and math.isclose(one.ratio, ratio):
            if one.low >= least:
                return ""
            return (
                f"says that {one.same} of {one.answers} answers agree with {asked}, which shows an agreement of "
                f"{one.low:.2f}, and expected_agreement is {least:g}"
            )
    known = ", ".join(f"{one.selector} at {one.ratio:g}" for one in card.measured)
    return f"has no figures of {asked}, only of {known}"
