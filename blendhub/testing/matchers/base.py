"""What all parts of the matcher suite share: how to make a matcher, and texts to store in it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import numpy as np
import pytest

from blendhub.contracts.matcher import Matcher
from blendhub.core.spans import Span
from blendhub.core.tokens import Tokens, as_tokens
from blendhub.framework.host import PluginHost
from blendhub.framework.options import parse_options
from blendhub.testing.checks import MatcherWithOracle


class Writer:
    """Writes texts that fit the matcher under test: long enough to be certain, with no token in common."""

    def __init__(self, matcher: Matcher, separator: tuple[int, ...], seed: int = 20) -> None:
        # An odd number beyond twice the guarantee, so that no border of a text falls on a chunk's.
        self.length = max(2 * matcher.guaranteed_tokens + 7, 41)
        self._separated = matcher.reach == "segments"
        self._separator = np.array(separator, np.uint32)
        self._random = np.random.default_rng(seed)

    def text(self, length: int | None = None) -> Tokens:
        """A new text without separators."""
        tokens = self._random.integers(2**20, 2**32, length or self.length, dtype=np.uint32)
        tokens[np.isin(tokens, self._separator)] = 2**19
        return as_tokens(tokens)

    def joined(self, *texts: Tokens) -> tuple[Tokens, list[Span]]:
        """The texts in one sequence, as a matcher of this reach can tell them apart, and where each stands."""
        parts: list[Tokens] = []
        spans: list[Span] = []
        at = 0
        for text in texts:
            if parts and self._separated:
                parts.append(self._separator)
                at += len(self._separator)
            parts.append(text)
            spans.append(Span(at, at + len(text)))
            at += len(text)
        return as_tokens(np.concatenate(parts)), spans


class MatcherTests(ABC):
    """Base of the parts of the suite. A subclass's ``create`` makes the matcher under test, empty."""

    contract: ClassVar[type] = Matcher

    separator: ClassVar[tuple[int, ...]] = (0,)
    """What ends a segment; used only for matchers whose reach is ``segments``. Of an installed matcher, its
    option ``separator`` is taken."""

    entries: ClassVar[int] = 2000
    """How many runs the tests of growth store; a matcher that is slow on purpose may set fewer."""

    @abstractmethod
    def create(self) -> Matcher:
        """A new, empty matcher."""

    @classmethod
    def of_installed(cls, host: PluginHost, name: str, options: Mapping[str, Any]) -> type[Self]:
        """The suite of an installed matcher; raises if it cannot be created with these options."""

        def create(suite: object) -> Any:
            return host.create("matcher", name, options)

        create(None)
        parsed = parse_options(f"matcher {name!r}", host.spec("matcher", name).options, options)
        attributes = {"separator": parsed.separator} if hasattr(parsed, "separator") else {}
        return type("TestInstalledMatcher", (cls,), {"create": create, **attributes})

    @pytest.fixture
    def matcher(self) -> Matcher:
        return self.create()

    @pytest.fixture
    def checked(self, matcher: Matcher) -> MatcherWithOracle:
        return MatcherWithOracle(matcher, self.separator)

    @pytest.fixture
    def writer(self, matcher: Matcher) -> Writer:
        return Writer(matcher, self.separator)
