"""The suites that ship with BlendHub: every sentence of the contracts, tested on these plugins."""

from blendhub_example.edges import EdgesOptions, EdgesSelector
from blendhub_example.ngram import NgramMatcher, NgramOptions
from blendhub_example.plain import PlainDevice

from blendhub.testing import DeviceSuite, MatcherSuite, SelectorSuite


class TestNgramMatcher(MatcherSuite):
    def create(self) -> NgramMatcher:
        return NgramMatcher(NgramOptions(window_tokens=16))


class TestEdgesSelector(SelectorSuite):
    capabilities = ("own_ratio",)

    def create(self) -> EdgesSelector:
        return EdgesSelector(EdgesOptions(k=8))


class TestPlainDevice(DeviceSuite):
    def create(self) -> PlainDevice:
        return PlainDevice()
