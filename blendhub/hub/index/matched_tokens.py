"""The answers of a namespace's matchers to one prompt, put together. What is too far from exact KV is left out."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from blendhub.core.spans import MOST_GENERATION, Match, Span, combine, gaps, join_spans

if TYPE_CHECKING:
    from blendhub.hub.index.namespace_index import Run

WORTH_A_GENERATION = 1 / 16
"""The share of a prompt's tokens that each further generation must bring."""


class MatchedTokens(NamedTuple):
    """What was found of a prompt."""

    matches: list[Match]
    too_old: list[Span]
    """What is stored of the prompt, but of too high a generation only."""

    @property
    def n_tokens(self) -> int:
        return sum(len(match.span) for match in self.matches)


def combined(
    answers: Sequence[Sequence[Match]], runs: Mapping[int, "Run"], n_tokens: int, max_generation: int
) -> MatchedTokens:
    """The answers as one, with the generation of each match; reuse makes no KV of a higher one than the given one.

    Reuse raises the generation of all that is computed behind it, so each generation beyond the first must bring some
    of the prompt: for the sake of a few old words, a long text would soon be too old itself. Without a bound, all is
    reused.
    """
    known = [[known for match in answer if (known := _with_generation(match, runs))] for answer in answers]
    if max_generation == MOST_GENERATION:
        return _younger(known, max_generation + 1)
    made = {max(match.generation + match.moved, 1) for answer in known for match in answer}
    bounds = sorted(bound for bound in made if bound <= max_generation) or [max_generation]
    found = {bound: _younger(known, bound) for bound in bounds}
    cost = WORTH_A_GENERATION * n_tokens
    return found[max(bounds, key=lambda bound: (found[bound].n_tokens - bound * cost, -bound))]


def _with_generation(match: Match, runs: Mapping[int, "Run"]) -> Match | None:
    """None for a run that was dropped since the matcher looked."""
    run = runs.get(match.run)
    if run is None or not run.origin.generation:
        return match if run else None
    return msgspec.structs.replace(match, generation=run.origin.generation)


def _younger(answers: Sequence[Sequence[Match]], max_generation: int) -> MatchedTokens:
    too_old: list[Span] = []
    young: list[list[Match]] = []
    for answer in answers:
        fits = [match.generation + match.moved <= max_generation for match in answer]
        young.append([match for match, fit in zip(answer, fits, strict=True) if fit])
        too_old += [match.span for match, fit in zip(answer, fits, strict=True) if not fit]
    matches = combine(young)
    found = [match.span for match in matches]
    return MatchedTokens(matches, [gap for span in join_spans(too_old) for gap in gaps(span, found)])
