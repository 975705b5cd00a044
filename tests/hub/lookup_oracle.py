"""What a lookup must find, may find and must say, told slowly from the index's runs and the texts that were stored."""

from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from blendhub.client import wire
from blendhub.contracts import RunKey
from blendhub.core.layout import MIN_SAVED_TOKENS, MIN_SEAM_TOKENS
from blendhub.core.spans import Match, Span, gaps
from blendhub.core.tokens import Tokens
from blendhub.hub.index.matchers import Use
from blendhub.hub.index.namespace_index import Chunk, NamespaceIndex, Run
from blendhub.outcome.reasons import Why


class Stretch(NamedTuple):
    """A span of a prompt that a run holds from ``source`` on."""

    span: Span
    run: Run
    source: int


def check_found(
    index: NamespaceIndex,
    stored: set[Chunk],
    texts: dict[RunKey, Tokens],
    prompt: Tokens,
    found: wire.Found,
    skip_prefix: int,
    settled: float | None,
) -> None:
    """Check an answer. ``stored``: the chunks that were stored all the time, by whose runs' names ``texts`` has their
    tokens."""
    runs = {chunk.run: texts[chunk.run.key] for chunk in stored if chunk.run.key in texts}
    if index.namespace.moves_states:
        check_segments(index, stored, runs, prompt, found, skip_prefix)
        return
    for match in found.matches:
        if match.run in index.runs and (run := index.runs[match.run]) in runs:
            check_kind(match, run, prompt, runs[run], settled)
    parts = [stretch for run, text in runs.items() for stretch in stretches(run, stored, prompt, text)]
    exact = [match.span for match in found.matches if match.exact] + [*found.on_the_way]
    behind = [part for part in parts if is_behind_its_prefix(part, prompt, runs[part.run])]
    must_be_exact = positions(part.span for part in behind if part.run.provenance.is_exact)
    assert must_be_exact - set(range(skip_prefix)) <= positions(exact), "exact KV is hidden"
    used = positions([match.span for match in found.matches] + [*found.on_the_way])
    size = max(matcher.guaranteed_tokens for matcher in index.matchers.by_use[Use.REUSE])
    movable = (part for part in parts if len(part.span) >= size and part.source >= part.run.provenance.movable_from)
    told = {(position, text.code) for text in found.staying for position in range(text.span.start, text.span.end)}
    later = {position for position, code in told if code is Why.SHALLOW}
    assert positions(part.span for part in movable) - set(range(skip_prefix)) <= used | later, "what may move is hidden"
    if settled is None and not skip_prefix and not found.on_the_way:
        check_staying(parts, prompt, found, size, {position for position, _ in told})


def check_segments(
    index: NamespaceIndex,
    stored: set[Chunk],
    runs: dict[Run, Tokens],
    prompt: Tokens,
    found: wire.Found,
    skip_prefix: int,
) -> None:
    """Of a model with recurrent layers, without any state: the whole segments that cover most of the prompt."""
    segments = {}
    for run, text in runs.items():
        span = run.provenance.map.span if run.provenance.map else Span(0, 0)
        spans = {chunk.span for chunk in run.chunks.values() if chunk in stored}
        if len(span) and spans.issuperset(index.namespace.chunks_of(span)):
            segments[run.id] = text[span.start : span.end]
    border = skip_prefix
    for match in found.matches:
        assert match.moved and match.span.start >= border + MIN_SEAM_TOKENS
        if match.run in segments:
            assert np.array_equal(prompt[match.span.start : match.span.end], segments[match.run])
        border = match.span.end
    assert [one.span for one in found.maps] == [match.span for match in found.matches]
    n_found = sum(len(match.span) for match in found.matches)
    assert found.on_the_way or n_found >= most_covered(prompt, segments.values(), skip_prefix), "a segment is hidden"
    held = positions(part.span for run, text in runs.items() for part in stretches(run, stored, prompt, text))
    assert positions(text.span for text in found.staying if text.code is Why.NO_MAP) <= held


def most_covered(prompt: Tokens, texts: Collection[Tokens], border: int) -> int:
    """The most tokens that whole texts cover, each behind a seam, told position by position."""
    most = [0] * (len(prompt) + MIN_SEAM_TOKENS + 1)
    for at in reversed(range(border, len(prompt))):
        fitting = [len(text) for text in texts if np.array_equal(prompt[at : at + len(text)], text)]
        behind_a_seam = fitting if at >= border + MIN_SEAM_TOKENS else []
        most[at] = max([most[at + 1], *(n + most[at + n + MIN_SEAM_TOKENS] for n in behind_a_seam)])
    return most[border] if border < len(prompt) else 0


def check_kind(match: Match, run: Run, prompt: Tokens, text: Tokens, settled: float | None) -> None:
    source = text[match.source_start : match.source_start + len(match.span)]
    assert np.array_equal(source, prompt[match.span.start : match.span.end]), "a match names other tokens"
    if match.moved:
        assert match.source_start >= run.provenance.movable_from, "it stays"
        return
    assert np.array_equal(text[: match.span.end], prompt[: match.span.end]), "another prefix stands before it"
    assert run.provenance.is_exact == match.exact
    assert match.exact or (settled is not None and run.provenance.ratio >= settled), "less of it was recomputed"


def check_staying(parts: list[Stretch], prompt: Tokens, found: wire.Found, size: int, told: set[int]) -> None:
    """A long hole of which a text is stored that may not move has the reason."""
    matches = [match.span for match in found.matches]
    whole = Span(0, len(prompt))
    if max((len(gap) for gap in gaps(whole, matches)), default=0) < MIN_SAVED_TOKENS:
        return
    exact = [part for part in parts if part.run.provenance.is_exact]
    staying = [part for part in exact if part.source + len(part.span) <= part.run.provenance.movable_from]
    must_be_told = positions(part.span for part in staying if len(part.span) >= size) - positions(matches)
    assert must_be_told <= told, "a text that stays is no reason"
    for text in found.staying:
        if text.code is Why.NOT_DONATED:
            held = positions(part.span for part in staying if not part.run.provenance.is_movable)
            assert positions([text.span]) <= held, "all that is stored of it was donated"


def stretches(run: Run, stored: set[Chunk], prompt: Tokens, text: Tokens) -> Iterator[Stretch]:
    """The longest stretches of the prompt that a run holds: all of each before the position from which on its KV may
    be moved, or all of it behind. No token is twice in the prompt, or in the text."""
    held = np.zeros(len(text), bool)
    for chunk in run.chunks.values():
        held[chunk.span.start : chunk.span.end] = chunk in stored
    _, places, sources = np.intersect1d(prompt, text, assume_unique=True, return_indices=True)
    pairs = sorted((int(at), int(source)) for at, source in zip(places, sources, strict=True) if held[source])
    border = run.provenance.movable_from
    first = last = None
    for at, source in pairs:
        if first and last and ((at, source) != (last[0] + 1, last[1] + 1) or source == border):
            yield Stretch(Span(first[0], last[0] + 1), run, first[1])
            first = None
        first, last = first or (at, source), (at, source)
    if first and last:
        yield Stretch(Span(first[0], last[0] + 1), run, first[1])


def is_behind_its_prefix(part: Stretch, prompt: Tokens, text: Tokens) -> bool:
    return part.source == part.span.start and np.array_equal(prompt[: part.source], text[: part.source])


def positions(spans: Iterable[Span]) -> set[int]:
    return {position for span in spans for position in range(span.start, span.end)}
