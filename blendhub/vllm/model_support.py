"""How far a loaded model can reuse KV."""

from pathlib import Path
from typing import Any

import msgspec

from blendhub.core.layout import KVLayout
from blendhub.outcome.model_card import Use, dtype_name, read_card, why_not
from blendhub.vllm.settings import OWNER, Settings


class ModelSupport(msgspec.Struct, frozen=True):
    """The results of a worker's start-up checks."""

    layouts: tuple[KVLayout, ...]
    """The layout of each group of layers; empty: nothing can be reused."""
    blends: bool
    """Whether moved text can be reused, and holes computed apart from the engine's own prefill."""
    reasons: tuple[str, ...]
    """A sentence for each restriction."""
    audits: bool = False
    """Whether blended requests can be audited."""


def unsupported(reason: str) -> ModelSupport:
    return ModelSupport((), False, (reason,))


def permitted(support: ModelSupport, settings: Settings, served: Any) -> ModelSupport:
    """What the model supports, without blending if the settings name a card that does not permit it.

    ``served`` is vLLM's configuration of the model.
    """
    path, chosen = settings.model_card, settings.selector
    if not (path and support.blends):
        return support
    dtype, ratio, expected = dtype_name(served.dtype), settings.recompute_ratio, settings.expected_agreement
    try:
        card = read_card(Path(path).read_text(encoding="utf-8"))
        why = why_not(card, Use(served.model, dtype, chosen.name, chosen.options, ratio, expected))
    except (OSError, ValueError) as error:
        advise = f"blendhub advise --model {served.model} --data FILE --card {path}"
        why = f"is no card that can be read ({error}); `{advise}` makes one"
    if not why:
        return support
    reason = f"only exact prefixes are reused: {OWNER}.model_card, {path}, {why}"
    return msgspec.structs.replace(support, blends=False, audits=False, reasons=(*support.reasons, reason))
