"""Provenance: where the KV of a span comes from. The adapter, the wire, the index, the disk and the fleet share it."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from blendhub.core.errors import InvalidInput
from blendhub.core.spans import NOWHERE, Position, Span

Ratio = Annotated[float, Meta(ge=0, le=1)]
Kind = Literal["exact", "blended", "after_blended", "by_other"]
"""How KV came about.

``exact``: the model alone computed it, and all KV before it. ``blended``: it was moved here, or it is of a span that
holds such KV. ``after_blended``: the model computed it, behind blended KV. ``by_other``: another connector
loaded it, and it is approximate, or stands behind approximate KV; it is never stored.
"""


MapBytes = Annotated[int, Meta(ge=1, le=2**40)]


class StateMap(msgspec.Struct, frozen=True, array_like=True):
    """What a segment does to the state of all recurrent layers of a model, whatever stood before it."""

    span: Span
    """The segment. It is the whole run, and of use only whole: the slot of its last chunk ends with the map."""
    shard_bytes: MapBytes
    """The map on one rank."""


class Provenance(msgspec.Struct, frozen=True, array_like=True):
    """Where KV comes from. What it was computed for, a model with its LoRA adapter and a salt, is its namespace."""

    kind: Kind = "exact"
    ratio: Ratio = 1.0
    """The least share that was recomputed of the moved text in it, and before it."""
    donates_from: Position = 0
    """The position from which on its tokens may be moved into other prompts. What lies before, such as KV that was
    computed with too little context, is of use behind its whole prefix only; ``NOWHERE`` for all of it."""
    has_state: bool = False
    """Whether each chunk ends with the state that the model's recurrent layers have behind its last token."""
    map: StateMap | None = None
    """Makes the run a segment: a text that moves in a model with recurrent layers."""

    def map_bytes_at(self, chunk_end: int) -> int:
        """What the map takes on one rank with which a chunk that ends there ends; 0: it ends with none."""
        return self.map.shard_bytes if self.map and self.map.span.end == chunk_end else 0

    @property
    def is_exact(self) -> bool:
        """Whether it is what the model alone would compute."""
        return self.kind == "exact"

    @property
    def movable_from(self) -> int:
        """The position from which on the KV may be moved: KV that was blended never moves again."""
        return self.donates_from if self.kind in ("exact", "after_blended") else NOWHERE

    def check_stored(self) -> None:
        """Raise InvalidInput if such KV is never stored."""
        if self.kind == "by_other":
            raise InvalidInput("KV that another connector loaded is never stored: nothing says how it came about")
        if self.map and (self.has_state or self.movable_from > self.map.span.start or not len(self.map.span)):
            raise InvalidInput(f"a segment has tokens, all of which may move, and no state, but this is {self}")

    @property
    def is_movable(self) -> bool:
        return self.movable_from < NOWHERE


EXACT = Provenance()
"""The provenance of what the model alone computes, and what any prompt may move."""
