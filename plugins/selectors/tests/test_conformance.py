"""The conformance suite, run on each built-in selector."""

import pytest

from blendhub import PluginHost
from blendhub.contracts import Selector
from blendhub.testing import SelectorSuite

HOST = PluginHost.discover()


class TestHkvd(SelectorSuite):
    def create(self) -> Selector:
        return HOST.create("selector", "hkvd")


class TestAttended(SelectorSuite):
    def create(self) -> Selector:
        return HOST.create("selector", "attended")


class TestFirstK(SelectorSuite):
    capabilities = ("own_ratio",)

    def create(self) -> Selector:
        return HOST.create("selector", "first_k")


@pytest.mark.slow
class TestHkvdOfKeysInWindows(SelectorSuite):
    def create(self) -> Selector:
        return HOST.create("selector", "hkvd", {"signal": "k", "layer": 3, "window_tokens": 4, "probe_share": 1.0})


@pytest.mark.slow
class TestAttendedInWindows(SelectorSuite):
    def create(self) -> Selector:
        return HOST.create("selector", "attended", {"window_tokens": 4, "layers": [0.0, 0.9], "attending_tokens": 64})


@pytest.mark.slow
class TestHkvdOfValuesInBlocks(SelectorSuite):
    def create(self) -> Selector:
        return HOST.create("selector", "hkvd", {"signal": "v", "block_tokens": 32})


@pytest.mark.slow
class TestFirstKOfTheRatio(SelectorSuite):
    def create(self) -> Selector:
        return HOST.create("selector", "first_k", {"k": 0})
