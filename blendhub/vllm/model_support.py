"""How far a loaded model can reuse KV."""

import msgspec

from blendhub.layout import KVLayout


class ModelSupport(msgspec.Struct, frozen=True):
    """What the start-up checks of a worker found."""

    layout: KVLayout | None
    """None: nothing can be reused."""
    blends: bool
    """Whether moved text can be reused, and holes computed apart from the engine's own prefill."""
    reasons: tuple[str, ...]
    """A sentence for each restriction."""
    audits: bool = False
    """Whether blended requests can be audited."""


def unsupported(reason: str) -> ModelSupport:
    return ModelSupport(None, False, (reason,))
