"""The conformance suite, run on each built-in selector."""

import pytest

from blendhub import PluginHost
from blendhub.contracts import Selector
from blendhub.testing import SelectorSuite

HOST = PluginHost.discover()


class TestHkvd(SelectorSuite):
    def create(self) -> Selector:
        return HOST.create("selector", "hkvd")


class TestCombined(SelectorSuite):
    capabilities = ("sensitivity",)

    def create(self) -> Selector:
        return HOST.create("selector", "combined")


@pytest.mark.slow
class TestLearned(SelectorSuite):
    capabilities = ("sensitivity",)

    def create(self) -> Selector:
        return HOST.create("selector", "learned", {"learned_tokens": 7, "head_share": 1.0})


@pytest.mark.slow
class TestQuestion(SelectorSuite):
    def create(self) -> Selector:
        return HOST.create("selector", "question")


@pytest.mark.slow
class TestHkvdInWindows(SelectorSuite):
    def create(self) -> Selector:
        return HOST.create("selector", "hkvd", {"window_tokens": 4, "probe_share": 1.0})


@pytest.mark.slow
class TestFirstKOfTheRatio(SelectorSuite):
    def create(self) -> Selector:
        return HOST.create("selector", "first_k", {"k": 0})


@pytest.mark.slow
class TestHkvdOfKeys(SelectorSuite):
    def create(self) -> Selector:
        return HOST.create("selector", "hkvd", {"signal": "k", "layer": 3})


@pytest.mark.slow
class TestHkvdOfValuesInBlocks(SelectorSuite):
    def create(self) -> Selector:
        return HOST.create("selector", "hkvd", {"signal": "v", "block_tokens": 32})


class TestRandom(SelectorSuite):
    def create(self) -> Selector:
        return HOST.create("selector", "random")


@pytest.mark.slow
class TestRandomInBlocks(SelectorSuite):
    def create(self) -> Selector:
        return HOST.create("selector", "random", {"seed": 5, "block_tokens": 8})


class TestFirstK(SelectorSuite):
    capabilities = ("own_ratio",)

    def create(self) -> Selector:
        return HOST.create("selector", "first_k")


class TestAll(SelectorSuite):
    capabilities = ("no_ratio",)

    def create(self) -> Selector:
        return HOST.create("selector", "all")


class TestNone(SelectorSuite):
    capabilities = ("no_ratio",)

    def create(self) -> Selector:
        return HOST.create("selector", "none")
