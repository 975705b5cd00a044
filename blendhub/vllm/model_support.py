"""How far a loaded model can reuse KV."""

import msgspec

from blendhub.core.layout import KVLayout


class ModelSupport(msgspec.Struct, frozen=True):
    """The results of a worker's start-up checks."""

    layout: KVLayout | None
    """The layout of the KV; None: nothing can be reused."""
    blends: bool
    """Whether moved text can be reused, and holes computed apart from the engine's own prefill."""
    reasons: tuple[str, ...]
    """A sentence for each restriction."""
    audits: bool = False
    """Whether blended requests can be audited."""


def unsupported(reason: str) -> ModelSupport:
    return ModelSupport(None, False, (reason,))
