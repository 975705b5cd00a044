"""The conformance suite, run on each built-in selector as ``blendhub conformance`` runs it."""

import pytest

from blendhub import PluginHost
from blendhub.testing import SelectorSuite

HOST = PluginHost.discover()
IN_WINDOWS = {"signal": "k", "layer": 3, "window_tokens": 4, "probe_share": 1.0}
IN_BLOCKS = {"signal": "v", "block_tokens": 32}
AT_ENDS = {"window_tokens": 4, "layers": [0.0, 0.9], "attending_tokens": 64}


class TestHkvd(SelectorSuite.of_installed(HOST, "hkvd", {})):  # type: ignore[misc]
    pass


class TestAttended(SelectorSuite.of_installed(HOST, "attended", {})):  # type: ignore[misc]
    pass


class TestFirstK(SelectorSuite.of_installed(HOST, "first_k", {})):  # type: ignore[misc]
    pass


class OtherOptions:
    """What does not depend on options is tested once."""

    pytestmark = pytest.mark.slow
    test_a_process_with_another_hash_seed_agrees = None


class TestHkvdOfKeysInWindows(OtherOptions, SelectorSuite.of_installed(HOST, "hkvd", IN_WINDOWS)):  # type: ignore[misc]
    pass


class TestHkvdOfValuesInBlocks(OtherOptions, SelectorSuite.of_installed(HOST, "hkvd", IN_BLOCKS)):  # type: ignore[misc]
    pass


class TestAttendedInWindows(OtherOptions, SelectorSuite.of_installed(HOST, "attended", AT_ENDS)):  # type: ignore[misc]
    pass


class TestFirstKOfTheRatio(OtherOptions, SelectorSuite.of_installed(HOST, "first_k", {"k": 0})):  # type: ignore[misc]
    pass
