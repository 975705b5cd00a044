"""Bad input is refused with InvalidInput and changes nothing; every kind of good buffer is accepted."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from blendhub.contracts.matcher import Matcher
from blendhub.core.errors import InvalidInput
from blendhub.core.spans import Span
from blendhub.core.tokens import Tokens
from blendhub.testing.checks import MatcherWithOracle, covers
from blendhub.testing.matchers.base import MatcherTests, Writer
from blendhub.testing.sentences import holds


def _strided(tokens: Tokens) -> Tokens:
    """The tokens, with others in between that a careless reader would take."""
    wide = np.zeros(2 * len(tokens), np.uint32)
    wide[::2] = tokens
    return wide[::2]


def _read_only(tokens: Tokens) -> Tokens:
    copy = tokens.copy()
    copy.flags.writeable = False
    return copy


GOOD_BUFFERS: dict[str, Callable[[Tokens], Any]] = {
    "bytes": lambda tokens: tokens.tobytes(),
    "bytearray": lambda tokens: bytearray(tokens.tobytes()),
    "memoryview": lambda tokens: memoryview(tokens.tobytes()),
    "unaligned memoryview": lambda tokens: memoryview(b"x" + tokens.tobytes())[1:],
    "read-only array": _read_only,
    "array that is not contiguous": _strided,
}

BAD_BUFFERS: dict[str, Callable[[Tokens], Any]] = {
    "list": lambda tokens: tokens.tolist(),
    "tuple": lambda tokens: tuple(tokens.tolist()),
    "nothing": lambda tokens: None,
    "text": lambda tokens: "tokens",
    "int64 array": lambda tokens: tokens.astype(np.int64),
    "int32 array": lambda tokens: tokens.astype(np.int32),
    "float array": lambda tokens: tokens.astype(np.float64),
    "array of two dimensions": lambda tokens: np.stack([tokens, tokens]),
    "array of no dimension": lambda tokens: np.array(tokens[0]),
    "odd number of bytes": lambda tokens: tokens.tobytes()[:-1],
    "memoryview of an odd number of bytes": lambda tokens: memoryview(tokens.tobytes())[:-3],
}

BAD_RUNS: list[Any] = [-1, 2**63, True, False, 1.0, "1", None]


@holds("Bad input raises :class:`blendhub.core.errors.InvalidInput` and changes nothing.")
class RefusingTests(MatcherTests):
    """The suite stores a run 1 and a run 0, so that a careless matcher takes True and 1.0 for them."""

    @pytest.fixture
    def known(self, matcher: Matcher, writer: Writer) -> Tokens:
        text = writer.text()
        for run in (0, 1):
            matcher.add(run, text, Span(0, len(text) - 10))
        return text

    @contextmanager
    def refused(self, matcher: Matcher, probe: Tokens) -> Iterator[None]:
        """Assert that the enclosed call raises InvalidInput with a sentence, and leaves the matcher as it was."""
        before = len(matcher), matcher.nbytes, matcher.match(probe)
        with pytest.raises(InvalidInput) as caught:
            yield
        assert len(str(caught.value)) > 10, "the error needs a sentence that says what is wrong"
        assert (len(matcher), matcher.nbytes, matcher.match(probe)) == before

    @pytest.mark.parametrize("form", GOOD_BUFFERS)
    def test_accepts(self, checked: MatcherWithOracle, writer: Writer, form: str) -> None:
        text = writer.text()
        buffer = GOOD_BUFFERS[form](text)
        checked.add(1, text)
        plain = checked.match(text)
        assert checked.matcher.match(buffer) == plain
        checked.discard(1, Span(0, len(text)))
        checked.matcher.add(1, buffer, Span(0, len(text)))
        found = checked.matcher.match(text)
        assert found == plain and covers(found, Span(0, len(text)))

    @pytest.mark.parametrize("form", BAD_BUFFERS)
    def test_refuses_tokens(self, matcher: Matcher, known: Tokens, form: str) -> None:
        buffer = BAD_BUFFERS[form](known)
        with self.refused(matcher, known):
            matcher.match(buffer)
        with self.refused(matcher, known):
            matcher.add(2, buffer, Span(0, 4))
        with self.refused(matcher, known):
            matcher.add(1, buffer, Span(len(known) - 10, len(known)))

    @pytest.mark.parametrize("run", BAD_RUNS, ids=repr)
    def test_refuses_run_ids(self, matcher: Matcher, known: Tokens, run: Any) -> None:
        with self.refused(matcher, known):
            matcher.add(run, known, Span(0, 4))
        with self.refused(matcher, known):
            matcher.add(run, known, Span(len(known) - 10, len(known)))
        with self.refused(matcher, known):
            matcher.discard(run, Span(0, 4))

    def test_refuses_spans_to_add(self, matcher: Matcher, known: Tokens) -> None:
        for span in (Span(4, 4), Span(0, len(known) + 1), Span(len(known), len(known) + 1)):
            with self.refused(matcher, known):
                matcher.add(2, known, span)

    def test_refuses_growth_anywhere_but_at_the_end(self, matcher: Matcher, known: Tokens) -> None:
        end = len(known) - 10
        for span in (Span(end + 1, end + 3), Span(end - 1, end + 3), Span(0, end), Span(0, end + 1), Span(end, end)):
            with self.refused(matcher, known):
                matcher.add(1, known, span)
        matcher.add(1, known, Span(end, end + 10))

    def test_a_discarded_end_still_counts_as_the_end(self, matcher: Matcher, known: Tokens) -> None:
        end = len(known) - 10
        matcher.discard(1, Span(end - 4, end))
        with self.refused(matcher, known):
            matcher.add(1, known, Span(end - 4, end))
        matcher.add(1, known, Span(end, end + 1))

    def test_refuses_to_discard_what_is_not_stored(self, matcher: Matcher, known: Tokens) -> None:
        end = len(known) - 10
        matcher.discard(1, Span(4, 8))
        for run, span in (
            (2, Span(0, 1)),
            (1, Span(end - 1, end + 1)),
            (1, Span(end, end + 1)),
            (1, Span(5, 6)),
            (1, Span(0, 5)),
            (1, Span(7, 12)),
            (1, Span(0, end)),
        ):
            with self.refused(matcher, known):
                matcher.discard(run, span)

    def test_refuses_to_discard_what_stood_before_the_run(self, matcher: Matcher, known: Tokens) -> None:
        matcher.add(5, known, Span(10, 20))
        for span in (Span(0, 1), Span(9, 11), Span(0, 20)):
            with self.refused(matcher, known):
                matcher.discard(5, span)

    def test_refuses_to_discard_twice(self, matcher: Matcher, known: Tokens) -> None:
        whole = Span(0, len(known) - 10)
        matcher.discard(1, whole)
        with self.refused(matcher, known):
            matcher.discard(1, whole)
