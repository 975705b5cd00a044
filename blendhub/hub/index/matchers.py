"""The matchers of one namespace: which of them find which KV."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from enum import Enum, auto
from functools import partial

from blendhub.contracts import Matcher
from blendhub.core.layout import Namespace
from blendhub.core.provenance import Provenance
from blendhub.core.spans import Match, Span
from blendhub.core.tokens import Tokens
from blendhub.framework.host import PluginHost
from blendhub.hub.index.segment_table import SegmentTable


class Use(Enum):
    """What KV may be found for. Each use has matchers of its own, so that what is of no use hides nothing that is."""

    REUSE = auto()
    """Exact KV behind its whole prefix, and KV that may move: the namespace's matchers."""
    SETTLED = auto()
    """KV that is not exact, behind its whole prefix alone, where it is loaded as it is. To a matcher it is exact, which
    means just that: same tokens, same positions, same whole prefix."""
    STAYING = auto()
    """Exact KV where it may not move, so that a lookup can say so. Where only segments move: all KV that was
    computed."""
    STATE = auto()
    """Chunks that end with a state of recurrent layers. The same tokens may be stored without a state, too."""


class Matchers:
    """The matchers by use. Those of all uses but the first are made when they are needed: each cache_salt makes a
    namespace, and many have no such KV. Methods are parts of a queue's work.

    Of a model with recurrent layers, KV is reused by prefix alone, and what moves are segments."""

    def __init__(self, namespace: Namespace, host: PluginHost) -> None:
        made = [(choice, host.create("matcher", choice.name, choice.options)) for choice in namespace.matchers]
        self._has_states, self._moves_states = bool(namespace.state_layouts), namespace.moves_states
        if self._has_states and not self._moves_states:
            made = [(choice, matcher) for choice, matcher in made if matcher.reach == "prefix"]
        reuse = [matcher for _, matcher in made if matcher.reach == "prefix" or not self._has_states]
        self.by_use: dict[Use, list[Matcher]] = {Use.REUSE: reuse}
        self.segments = SegmentTable()
        self._make: dict[Use, Callable[[], Matcher]] = {
            Use.SETTLED if matcher.reach == "prefix" else Use.STAYING: partial(
                host.create, "matcher", choice.name, choice.options
            )
            for choice, matcher in reversed(made)
        }
        """How to make a matcher of each of the other uses: like the namespace's first one that can find such KV."""
        if Use.SETTLED in self._make:
            self._make[Use.STATE] = self._make[Use.SETTLED]

    @property
    def nbytes(self) -> int:
        return self.segments.nbytes + sum(matcher.nbytes for matcher in self._all())

    def can_find(self, provenance: Provenance) -> bool:
        """Whether any matcher finds such KV: a state, and what is neither exact nor may move, only one that finds
        prefixes does. What was blended brings no state, so with recurrent layers it is of no use."""
        moves_or_is_exact = provenance.is_exact or provenance.is_movable
        if provenance.has_state or not (moves_or_is_exact or self._has_states):
            return Use.SETTLED in self._make
        return moves_or_is_exact

    def has_any(self, use: Use) -> bool:
        """Whether KV of this use was ever added."""
        return use in self.by_use

    def match(self, tokens: Tokens, use: Use) -> list[list[Match]]:
        """The answer of each matcher of a use."""
        return [matcher.match(tokens) for matcher in self.by_use.get(use, ())]

    def add(self, run: int, provenance: Provenance, tokens: Tokens, span: Span) -> None:
        for use, matcher, part in self._parts(provenance, span):
            matcher.add(run, tokens, part, provenance.is_exact or use is Use.SETTLED)
        if provenance.map and provenance.map_bytes_at(span.end):
            self.segments.add(run, provenance.map.span, tokens)

    def discard(self, run: int, provenance: Provenance, span: Span) -> None:
        for _, matcher, part in self._parts(provenance, span):
            matcher.discard(run, part)
        if provenance.map_bytes_at(span.end):
            self.segments.discard(run)

    def check_integrity(self, stored: Iterable[tuple[int, Provenance, Span]]) -> None:
        """Assert that the matchers have these spans of runs and no others."""
        n_tokens, segments = Counter[Matcher](), set[int]()
        for run, provenance, span in stored:
            if provenance.map_bytes_at(span.end):
                segments.add(run)
            for _, matcher, part in self._parts(provenance, span):
                n_tokens[matcher] += len(part)
        for matcher in self._all():
            assert len(matcher) == n_tokens[matcher], "a matcher knows other tokens than the index"
        assert self.segments.runs == segments, "segments are known without their last chunk, or are not known"

    def _parts(self, provenance: Provenance, span: Span) -> Iterator[tuple[Use, Matcher, Span]]:
        """The matchers that find KV of this provenance, and the part of the span that each finds."""
        border = min(max(span.start, provenance.movable_from), span.end)
        moving, staying = Span(border, span.end), Span(span.start, border)
        if self._moves_states:
            moving, staying = Span(border, border), span if provenance.is_exact else moving
        parts = [(Use.STAYING, staying)] if provenance.is_exact or self._moves_states else []
        if provenance.has_state:
            parts.append((Use.STATE, span))
        elif not provenance.is_exact:
            parts.append((Use.SETTLED, span))
        for use, part in parts:
            if len(part):
                yield from ((use, matcher, part) for matcher in self._made(use))
        for matcher in self.by_use[Use.REUSE] if not provenance.has_state else ():
            part = span if provenance.is_exact and matcher.reach == "prefix" else moving
            if len(part):
                yield Use.REUSE, matcher, part

    def _made(self, use: Use) -> list[Matcher]:
        """The matchers of one of the other uses; none where no matcher of the namespace can find such KV."""
        if use in self._make and use not in self.by_use:
            self.by_use[use] = [self._make[use]()]
        return self.by_use.get(use, [])

    def _all(self) -> Iterator[Matcher]:
        return (matcher for matchers in list(self.by_use.values()) for matcher in matchers)
