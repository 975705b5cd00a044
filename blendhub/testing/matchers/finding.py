"""What a matcher must find, what it must never find, and when a match may be called exact."""

import numpy as np
import pytest

from blendhub.contracts.matcher import Matcher
from blendhub.core.spans import Span
from blendhub.core.tokens import Tokens
from blendhub.testing.checks import MatcherWithOracle, covers, touches
from blendhub.testing.matchers.base import MatcherTests, Writer
from blendhub.testing.sentences import holds

CRAFTED_DIFFERENCES = {
    (0x9E3779B97F4A7C15, 2**64): (163, 788, 2850, -2934, 2789),
    (6364136223846793005, 2**64): (-1581, 4057, -5024, 547, -1079),
    (1000003, 2**64): (-266, -942, -2130, 3460, 3162),
    (0x100000001B3, 2**64): (1775, 2626, -1621, -2470, 58),
    (257, 2**64): (0, 0, 0, -1, 257),
    (131, 2**61 - 1): (0, 0, 0, -1, 131),
    (1000003, 2**61 - 1): (-503, -2048, 4, -712, 306),
    (911382323, 2**61 - 1): (-1307, -1434, -678, -2144, -1514),
    (257, 10**9 + 7): (-26, 25, -2, -12, -8),
}
"""A collision of the polynomial hash of each base and modulus: what can be added to five neighbouring tokens without
changing the hash of any window that holds them. Found by lattice reduction."""


@holds("The stored tokens that this prompt repeats, within the matcher's reach.")
class FindingTests(MatcherTests):
    """Every stored text within reach is found, token by token, and nothing else is."""

    def test_promises_a_known_reach(self, matcher: Matcher) -> None:
        assert matcher.reach in ("prefix", "segments", "anywhere")
        assert type(matcher.guaranteed_tokens) is int and matcher.guaranteed_tokens >= 1

    def test_a_stored_text_is_found_whole_and_no_other(self, checked: MatcherWithOracle, writer: Writer) -> None:
        text = writer.text()
        checked.add(7, text)
        matches = checked.match(text)
        assert covers(matches, Span(0, len(text)))
        assert {match.run for match in matches} == {7}
        for prompt in (writer.text(), text[:0]):
            assert checked.match(prompt) == []

    @holds("The length from which reuse within reach is certain to be found; shorter reuse may be.")
    def test_newer_runs_that_share_its_parts_hide_no_text(self, checked: MatcherWithOracle, writer: Writer) -> None:
        """Each part stands where it stands in the text, and is too short to be found for certain by itself."""
        certain, random = checked.matcher.guaranteed_tokens, np.random.default_rng(6)
        texts = [writer.text(certain), writer.text(11 * certain)]
        for run, text in enumerate(texts):
            checked.add(run, text)
        for run in range(2, 402):
            text, start = texts[run % 2], int(random.integers(1 - certain, len(texts[run % 2])))
            shared = slice(max(start, 0), start + certain - 1)
            tokens = writer.text(len(text)).copy()
            tokens[shared] = text[shared]
            checked.add(run, tokens)
        for text in texts:
            assert covers(checked.match(text), Span(0, len(text)))

    @holds("*Matches* are verified token by token: hashes may find candidates, they never")
    def test_texts_crafted_to_collide_are_told_apart(self, checked: MatcherWithOracle, writer: Writer) -> None:
        random, middle = np.random.default_rng(4), writer.length // 2
        for run, ((base, modulus), difference) in enumerate(CRAFTED_DIFFERENCES.items()):
            assert sum(d * base ** (4 - i) for i, d in enumerate(difference)) % modulus == 0, "this is no collision"
            text = random.integers(10_000, 20_000, writer.length).astype(np.uint32)
            forged = text.astype(np.int64)
            forged[middle : middle + 5] += difference
            checked.add(run, text)
            matches = checked.match(forged.astype(np.uint32))
            changed = [middle + i for i, d in enumerate(difference) if d]
            assert not any(touches(matches, Span(at, at + 1)) for at in changed)
        # Such a text of 2**11 tokens and its complement have one polynomial hash modulo 2**64, for any base. The offset
        # keeps both clear of the default separator.
        text = _thue_morse(11)
        checked.add(100, text + np.uint32(5))
        checked.match(np.uint32(6) - text)


def _thue_morse(order: int) -> Tokens:
    word = np.zeros(1, np.uint32)
    for _ in range(order):
        word = np.concatenate([word, np.uint32(1) - word])
    return word


@holds("A match is marked exact only when the stored KV is bit for bit what the")
class ExactnessTests(MatcherTests):
    """Same tokens, same positions, same whole prefix, and stored as exact: then only is a match exact.

    That no match says so wrongly is checked at every match of every test.
    """

    def test_a_prefix_stored_as_exact_is_exact(self, checked: MatcherWithOracle, writer: Writer) -> None:
        if checked.matcher.reach != "prefix":
            pytest.skip("only matchers of the reach 'prefix' promise this")
        text = writer.text()
        checked.add(1, text)
        matches = checked.match(np.concatenate([text, writer.text()]))
        assert sum(len(match.span) for match in matches if match.exact) == len(text)

    @holds("Where a few runs hold the same stretch of a prompt, a match names one all of")
    def test_an_exact_run_is_named_before_others(self, checked: MatcherWithOracle, writer: Writer) -> None:
        text = writer.text()
        prompt = np.concatenate([text, writer.text()])
        for run in range(1, 6):
            checked.add(run, text, exact=run in (2, 4))
        for named in ({2, 4}, {2, 4}, {1, 3, 5}):
            (match,) = checked.match(text if checked.matcher.reach == "segments" else prompt)
            assert match.run in named
            checked.discard(match.run, Span(0, len(text)))
