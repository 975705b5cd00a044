"""The answers of a namespace's matchers to one prompt, put together. What is too far from exact KV is left out."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from blendhub.core.spans import Match, Span, combine, gaps, join_spans

if TYPE_CHECKING:
    from blendhub.hub.index.namespace_index import Run


class MatchedTokens(NamedTuple):
    """What was found of a prompt."""

    matches: list[Match]
    too_old: list[Span]
    """What is stored of the prompt, but of too high a generation only."""


def combined(answers: Sequence[Sequence[Match]], runs: Mapping[int, "Run"], max_generation: int) -> MatchedTokens:
    """The answers as one, with the generation of each match; reuse makes no KV of a higher one than the given one."""
    young: list[list[Match]] = []
    too_old: list[Span] = []
    for answer in answers:
        young.append([])
        for match in answer:
            run = runs.get(match.run)
            if run is None:
                continue  # dropped since the matcher looked
            generation = run.origin.generation
            if generation + match.moved > max_generation:
                too_old.append(match.span)
            else:
                young[-1].append(msgspec.structs.replace(match, generation=generation) if generation else match)
    matches = combine(young)
    found = [match.span for match in matches]
    return MatchedTokens(matches, [gap for span in join_spans(too_old) for gap in gaps(span, found)])
