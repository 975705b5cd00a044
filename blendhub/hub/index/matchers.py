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


class Use(Enum):
    """What KV may be found for. Each use has matchers of its own, so that what is of no use hides nothing that is."""

    REUSE = auto()
    """Exact KV behind its whole prefix, and KV that may move: the namespace's matchers."""
    SETTLED = auto()
    """KV that is not exact, behind its whole prefix alone, where it is loaded as it is. To a matcher it is exact, which
    means just that: same tokens, same positions, same whole prefix."""
    STAYING = auto()
    """Exact KV where it may not move, so that a lookup can say so."""
    STATE = auto()
    """Chunks that end with a state of recurrent layers. The same tokens may be stored without a state, too."""


class Matchers:
    """The matchers by use. Those of all uses but the first are made when they are needed: each cache_salt makes a
    namespace, and many have no such KV. Methods are parts of a queue's work.

    Of a model with recurrent layers, no text moves: only matchers that find prefixes serve it."""

    def __init__(self, namespace: Namespace, host: PluginHost) -> None:
        made = [(choice, host.create("matcher", choice.name, choice.options)) for choice in namespace.matchers]
        if namespace.state_layouts:
            made = [(choice, matcher) for choice, matcher in made if matcher.reach == "prefix"]
        self.by_use: dict[Use, list[Matcher]] = {Use.REUSE: [matcher for _, matcher in made]}
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
        return sum(matcher.nbytes for matcher in self._all())

    def can_find(self, provenance: Provenance) -> bool:
        """Whether any matcher finds such KV: a state, and what is neither exact nor may move, only one that finds
        prefixes does."""
        moves_or_is_exact = not provenance.has_state and (provenance.is_exact or provenance.is_movable)
        return moves_or_is_exact or Use.SETTLED in self._make

    def has_any(self, use: Use) -> bool:
        """Whether KV of this use was ever added."""
        return use in self.by_use

    def match(self, tokens: Tokens, use: Use) -> list[list[Match]]:
        """The answer of each matcher of a use."""
        return [matcher.match(tokens) for matcher in self.by_use.get(use, ())]

    def add(self, run: int, provenance: Provenance, tokens: Tokens, span: Span) -> None:
        for use, matcher, part in self._parts(provenance, span):
            matcher.add(run, tokens, part, provenance.is_exact or use is Use.SETTLED)

    def discard(self, run: int, provenance: Provenance, span: Span) -> None:
        for _, matcher, part in self._parts(provenance, span):
            matcher.discard(run, part)

    def check_integrity(self, stored: Iterable[tuple[Provenance, Span]]) -> None:
        """Assert that the matchers have these spans and no others."""
        n_tokens = Counter[Matcher]()
        for provenance, span in stored:
            for _, matcher, part in self._parts(provenance, span):
                n_tokens[matcher] += len(part)
        for matcher in self._all():
            assert len(matcher) == n_tokens[matcher], "a matcher knows other tokens than the index"

    def _parts(self, provenance: Provenance, span: Span) -> Iterator[tuple[Use, Matcher, Span]]:
        """The matchers that find KV of this provenance, and the part of the span that each finds."""
        if provenance.has_state:
            yield from ((Use.STATE, matcher, span) for matcher in self._made(Use.STATE))
            return
        border = min(max(span.start, provenance.movable_from), span.end)
        whole, moving, staying = span, Span(border, span.end), Span(span.start, border)
        for matcher in self.by_use[Use.REUSE]:
            part = whole if provenance.is_exact and matcher.reach == "prefix" else moving
            if len(part):
                yield Use.REUSE, matcher, part
        use, part = (Use.STAYING, staying) if provenance.is_exact else (Use.SETTLED, whole)
        if len(part):
            yield from ((use, matcher, part) for matcher in self._made(use))

    def _made(self, use: Use) -> list[Matcher]:
        """The matchers of one of the other uses; none where no matcher of the namespace can find such KV."""
        if use in self._make and use not in self.by_use:
            self.by_use[use] = [self._make[use]()]
        return self.by_use.get(use, [])

    def _all(self) -> Iterator[Matcher]:
        return (matcher for matchers in list(self.by_use.values()) for matcher in matchers)
