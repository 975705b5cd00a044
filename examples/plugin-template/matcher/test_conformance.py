"""The suite that ships with BlendHub, run on this matcher."""

from ngram_matcher import NgramMatcher, NgramOptions

from blendhub.testing import MatcherSuite


class TestNgramMatcher(MatcherSuite):
    def create(self) -> NgramMatcher:
        return NgramMatcher(NgramOptions(window_tokens=16))
