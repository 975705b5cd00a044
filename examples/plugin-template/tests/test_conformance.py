"""The suite that ships with BlendHub: every sentence of the matcher's contract, tested on this matcher."""

from blendhub_ngram import NgramMatcher, NgramOptions

from blendhub.testing import MatcherSuite


class TestNgramMatcher(MatcherSuite):
    def create(self) -> NgramMatcher:
        return NgramMatcher(NgramOptions(window_tokens=16))
