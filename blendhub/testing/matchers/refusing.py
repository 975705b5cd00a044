"""Bad input is refused with InvalidInput and changes nothing."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from blendhub.contracts.matcher import Matcher
from blendhub.core.errors import InvalidInput
from blendhub.core.spans import Span
from blendhub.core.tokens import Tokens
from blendhub.testing.checks import MatcherWithOracle
from blendhub.testing.matchers.base import MatcherTests, Writer
from blendhub.testing.sentences import holds

BAD_RUNS: list[Any] = [-1, 2**63, True, 1.0, "1"]


@holds("Bad input raises :class:`blendhub.core.errors.InvalidInput` and changes nothing.")
class MatcherRefusingTests(MatcherTests):
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

    def test_accepts_any_buffer_of_uint32(self, checked: MatcherWithOracle, writer: Writer) -> None:
        text = writer.text()
        checked.add(1, text)
        plain = checked.match(text)
        spread = np.zeros(2 * len(text), np.uint32)
        spread[::2] = text
        for buffer in (text.tobytes(), memoryview(b"x" + text.tobytes())[1:], spread[::2]):
            assert checked.matcher.match(buffer) == plain
            checked.matcher.discard(1, Span(0, len(text)))
            checked.matcher.add(1, buffer, Span(0, len(text)))
            assert checked.matcher.match(text) == plain

    def test_refuses_tokens(self, matcher: Matcher, known: Tokens) -> None:
        """The contract checks them, for all matchers alike; a few show that its check was not replaced."""
        for buffer in (known.tolist(), known.astype(np.int64), known.tobytes()[:-1]):
            with self.refused(matcher, known):
                matcher.match(buffer)  # type: ignore[arg-type]
            with self.refused(matcher, known):
                matcher.add(2, buffer, Span(0, 4))  # type: ignore[arg-type]

    def test_refuses_run_ids(self, matcher: Matcher, known: Tokens) -> None:
        for run in BAD_RUNS:
            with self.refused(matcher, known):
                matcher.add(run, known, Span(len(known) - 10, len(known)))
            with self.refused(matcher, known):
                matcher.discard(run, Span(0, 4))

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
        matcher.add(5, known, Span(10, 20))
        for run, span in (
            (2, Span(0, 1)),
            (1, Span(end - 1, end + 1)),
            (1, Span(end, end + 1)),
            (1, Span(5, 6)),
            (1, Span(0, 5)),
            (1, Span(7, 12)),
            (1, Span(0, end)),
            # What stood before the run was never stored.
            (5, Span(0, 1)),
            (5, Span(9, 11)),
            (5, Span(0, 20)),
        ):
            with self.refused(matcher, known):
                matcher.discard(run, span)
        matcher.discard(0, Span(0, end))
        with self.refused(matcher, known):
            matcher.discard(0, Span(0, end))
