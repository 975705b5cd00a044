"""A selector in one file: the first and the last tokens of every moved span.

The first ones miss the text before them most. What follows the span attends to the last ones most.
"""

from typing import Annotated

import msgspec

from blendhub import PluginSpec, Span, hookimpl
from blendhub.contracts import Selection, Selector


class EdgesOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    k: Annotated[int, msgspec.Meta(ge=1, le=65536, description="tokens at each end of a moved span")] = 16


class EdgesSelector(Selector):
    def __init__(self, options: EdgesOptions) -> None:
        self._k = options.k

    def select(self, selection: Selection) -> list[Span]:
        if selection.ratio == 0:
            return []
        if selection.ratio == 1:
            return list(selection.moved)
        return [edge for span in selection.moved for edge in self._edges(span)]

    def _edges(self, span: Span) -> list[Span]:
        if len(span) <= 2 * self._k:
            return [span]
        return [Span(span.start, span.start + self._k), Span(span.end - self._k, span.end)]


@hookimpl
def blendhub_selectors() -> list[PluginSpec[Selector]]:
    return [
        PluginSpec(
            name="edges",
            api=1,
            summary="the first and the last tokens of every moved span",
            factory=EdgesSelector,
            options=EdgesOptions,
            capabilities=("own_ratio",),
        )
    ]
