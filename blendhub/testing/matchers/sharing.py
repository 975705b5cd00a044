"""Several threads share a matcher; several processes must agree on its answers."""

from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import msgspec
import pytest

from blendhub.contracts.matcher import Matcher
from blendhub.core.spans import Span
from blendhub.testing.checks import MatcherWithOracle, check_matches, covers
from blendhub.testing.matchers.base import MatcherTests, Writer
from blendhub.testing.run_in_subprocess import run_in_subprocess
from blendhub.testing.sentences import holds


@holds("All methods may be called from several threads at once; each call acts as a")
class MatcherSharingTests(MatcherTests):
    """Calls from several threads act as wholes, and the same calls give the same matches everywhere."""

    def test_one_thread_adds_while_another_matches(self, checked: MatcherWithOracle, writer: Writer) -> None:
        """A run that comes and goes is found whole or not at all; one that stays is always found."""
        matcher = checked.matcher
        staying, passing = writer.text(), writer.text(3 * writer.length)
        checked.add(1, staying)
        checked.reference.add(2, passing, Span(0, len(passing)))
        stop = Event()

        def come_and_go() -> int:
            times = 0
            while not stop.is_set():
                matcher.add(2, passing, Span(0, len(passing)))
                matcher.discard(2, Span(0, len(passing)))
                times += 1
            return times

        with ThreadPoolExecutor() as pool:
            writing = pool.submit(come_and_go)
            try:
                for _ in range(200):
                    matches = matcher.match(passing)
                    check_matches(passing, matches, checked.reference)
                    whole = Span(0, len(passing))
                    assert covers(matches, whole) or not matches, "a match saw half of an add or discard"
                    assert covers(matcher.match(staying), Span(0, len(staying)))
            finally:
                stop.set()
            assert writing.result() > 0

    @holds("The same calls give the same matches, whatever the secret and")
    @pytest.mark.slow
    def test_processes_with_other_hash_seeds_agree(self) -> None:
        assert run_in_subprocess(self, hash_seed="4242") == self.answers()

    def answers(self) -> list[Any]:
        """A story with many ties to decide: texts stored several times, in several neighbourhoods."""
        matcher: Matcher = self.create()
        writer = Writer(matcher, self.separator, seed=8)
        texts = [writer.text() for _ in range(6)]
        orders = [(0, 1, 2), (2, 1, 0), (3, 0), (0, 1, 2), (5, 4, 3, 2), (0, 1, 4)]
        for run, order in enumerate(orders):
            tokens, _ = writer.joined(*(texts[i] for i in order))
            matcher.add(run, tokens, Span(0, len(tokens)), exact=run != 4)
        matcher.discard(0, Span(3, 9))
        answers = []
        for order in [(0, 1, 2), (0, 1, 4, 5), (3, 0, 0), (1, 2), (5, 4, 3, 2, 1, 0), (4, 4)]:
            prompt, _ = writer.joined(*(texts[i] for i in order))
            answers.append(msgspec.to_builtins(matcher.match(prompt)))
        return answers
