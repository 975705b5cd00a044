"""What all parts of the matcher suite share: how to make a matcher, and texts to store in it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import numpy as np
import pytest

from blendhub.contracts.matcher import Matcher
from blendhub.core.spans import Span
from blendhub.core.tokens import Tokens
from blendhub.framework.host import PluginHost
from blendhub.testing.checks import MatcherWithOracle


class Writer:
    """Writes texts that fit the matcher under test: long enough to be certain, with no token in common."""

    def __init__(self, matcher: Matcher, seed: int = 20) -> None:
        # An odd number beyond twice the guarantee, so that no border of a text falls on a chunk's.
        self.length = max(2 * matcher.guaranteed_tokens + 7, 41)
        self._random = np.random.default_rng(seed)

    def text(self, length: int | None = None) -> Tokens:
        """A new text."""
        return self._random.integers(2**20, 2**32, length or self.length, dtype=np.uint32)

    @staticmethod
    def joined(*texts: Tokens) -> tuple[Tokens, list[Span]]:
        """The texts in one sequence, and where each stands."""
        ends = np.cumsum([len(text) for text in texts]).tolist()
        return np.concatenate(texts), [Span(end - len(text), end) for text, end in zip(texts, ends, strict=True)]


class MatcherTests(ABC):
    """Base of the parts of the suite. A subclass's ``create`` makes the matcher under test, empty."""

    contract: ClassVar[type] = Matcher

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
        return type("TestInstalledMatcher", (cls,), {"create": create})

    @pytest.fixture
    def matcher(self) -> Matcher:
        return self.create()

    @pytest.fixture
    def checked(self, matcher: Matcher) -> MatcherWithOracle:
        return MatcherWithOracle(matcher)

    @pytest.fixture
    def writer(self, matcher: Matcher) -> Writer:
        return Writer(matcher)

    def needs_reach(self, matcher: Matcher, reach: str) -> None:
        if matcher.reach != reach:
            pytest.skip(f"a matcher of reach {matcher.reach!r} does not promise this; only {reach} does")
